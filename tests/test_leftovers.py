"""What killed processes have left in the directory for temporary files goes, and nothing else."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from phalanx import leftovers
from phalanx.errors import DistStoreError
from phalanx.launch import processes
from phalanx.process import Stat
from phalanx.stores import meeting


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Have temporary files be kept in a directory of the test's, as in a process that starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    leftovers.sweep.cache_clear()
    meeting._sweep.cache_clear()
    yield tmp_path
    leftovers.sweep.cache_clear()
    meeting._sweep.cache_clear()


@pytest.fixture
def gone():
    """Return how a process is named that has ended."""
    with subprocess.Popen(["sleep", "1000"]) as process:
        name = f"{leftovers.place()}-{process.pid}-{Stat(f'/proc/{process.pid}').start_time}"
        assert not leftovers.is_gone(name)
        process.kill()
    assert leftovers.is_gone(name)
    return name


def test_directories_of_the_dead_are_removed_and_no_others(folder, gone):
    where, pid, start = gone.split("-")
    parent = Stat(f"/proc/{os.getppid()}").start_time
    stay = [
        f"phalanx-{leftovers.owner()}-abc",
        f"phalanx-{leftovers.place()}-{os.getppid()}-{parent}-abc",
        f"phalanx-{where[::-1]}-{pid}-{start}-abc",  # elsewhere
        f"phalanx-{gone}",
        f"other-{gone}-abc",
        f"phalanx-{gone}-abc.txt",
    ]
    for name in stay:
        (folder / name).mkdir()
    (folder / f"phalanx-{gone}-file").write_text("not a directory")
    target = folder / "target"
    (target / "inside").mkdir(parents=True)
    (folder / f"phalanx-{gone}-link").symlink_to(target)
    (folder / f"phalanx-{gone}-left" / "below").mkdir(parents=True)
    reused = f"phalanx-{leftovers.place()}-{os.getpid()}-1-left"  # another process of that number
    (folder / reused).mkdir()
    if os.geteuid() == 0:
        stay.append(f"phalanx-{gone}-theirs")
        (folder / stay[-1]).mkdir()
        os.chown(folder / stay[-1], 12345, 12345)
    made = leftovers.new_directory()
    found = {path.name for path in folder.iterdir()}
    links = {"target", f"phalanx-{gone}-file", f"phalanx-{gone}-link"}
    assert found == {*stay, *links, os.path.basename(made)}
    assert (target / "inside").is_dir()
    assert os.stat(made).st_mode & 0o777 == 0o700


def left_meeting(folder, owner, name):
    path = meeting.private_directory() / name
    path.write_text(f'{{"port": 1, "secret": "x", "owner": "{owner}"}}')
    return path


def test_meetings_of_the_dead_are_removed(folder, gone):
    dead = left_meeting(folder, gone, "a" * 32)
    alive = left_meeting(folder, leftovers.owner(), "b" * 32)
    unknown = left_meeting(folder, "", "c" * 32)
    store = meeting.meet(("some job",), 0, 2, 5.0)
    assert not dead.exists()
    assert alive.exists()
    assert unknown.exists()
    assert store.add("arrived", 0) == 1
    assert len(list(dead.parent.iterdir())) == 3  # the two, and that of this job


def test_a_meeting_that_takes_the_place_of_a_dead_one_stays(folder, gone, monkeypatch):
    path = left_meeting(folder, gone, "a" * 32)
    rename = Path.rename

    def rename_too_late(self, target):
        left_meeting(folder, leftovers.owner(), path.name)  # by rank 0 of another job
        rename(self, target)

    monkeypatch.setattr(Path, "rename", rename_too_late)
    leftovers.remove_if_left(path, meeting._OWNER)
    assert leftovers.owner() in path.read_text()
    assert list(path.parent.iterdir()) == [path]


STARTS = """
import os, sys, time
from phalanx.launch import processes
if __name__ == "__main__":
    with processes.Processes(1, processes.pack_task(time.sleep, (1000,)), dict(os.environ)):
        print(os.getpid(), flush=True)
        time.sleep(1000)
"""


def test_what_a_killed_launcher_left_is_removed_by_the_next(tmp_path):
    """Its ranks, which would have tidied up, are killed as well."""
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    with tempfile.TemporaryDirectory() as files:  # of a short name: it has a socket in it
        environment = {**os.environ, "TMPDIR": files}
        with subprocess.Popen(
            [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, text=True
        ) as launcher:
            assert launcher.stdout.readline()
            for pid in [launcher.pid, *processes.descendants(launcher.pid)]:
                os.kill(pid, signal.SIGKILL)
        assert len(list(Path(files).glob("phalanx-*"))) == 1
        sweep = "from phalanx import leftovers; leftovers.sweep()"
        subprocess.run([sys.executable, "-c", sweep], env=environment, check=True)
        assert list(Path(files).glob("phalanx-*")) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write everywhere")
def test_a_directory_that_cannot_be_written_is_named(folder):
    folder.chmod(0o500)
    with pytest.raises(PermissionError, match="set TMPDIR"):
        leftovers.new_directory()


def test_a_directory_that_is_not_there_is_named(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "none"))
    with pytest.raises(FileNotFoundError, match="set TMPDIR"):
        leftovers.new_directory()
    with pytest.raises(DistStoreError, match=r"ranks cannot meet: .*set TMPDIR"):
        meeting.private_directory()
