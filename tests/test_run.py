"""``phalanx run``, as a user calls it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from launches import Written, command, run


def test_labels_output_and_tells_ranks_who_they_are(program: Written) -> None:
    path = program(
        "import os, sys, json\n"
        "print(json.dumps([sys.argv, __name__, dict(os.environ)]))\n"
        "print('to stderr', file=sys.stderr)\n"
    )
    done = run("-n", 3, path, "--flag", "word")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    told = {}
    for line in done.stdout.splitlines():
        label, _, text = line.partition("] ")
        arguments, name, environment = json.loads(text)
        assert arguments == [str(path), "--flag", "word"]
        assert name == "__main__"
        assert label == f"[rank {environment['RANK']}"
        told[int(environment["RANK"])] = environment
    assert sorted(told) == [0, 1, 2]
    for rank, environment in told.items():
        assert environment["LOCAL_RANK"] == environment["ROLE_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "3"
        assert environment["GROUP_RANK"] == environment["TORCHELASTIC_RESTART_COUNT"] == "0"
    shared = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PHALANX_SECRET")
    assert len({tuple(environment[name] for name in shared) for environment in told.values()}) == 1
    for rank in range(3):
        assert f"[rank {rank}] to stderr" in done.stderr
    assert "OMP_NUM_THREADS=" in done.stderr


def test_collectives_of_phalanx_and_of_torch_in_one_program(program: Written) -> None:
    path = program(
        "import torch, phalanx, torch.distributed as theirs\n"
        "phalanx.init_process_group()\n"
        "theirs.init_process_group('gloo')\n"
        "x, y = torch.ones(1), torch.ones(1)\n"
        "phalanx.all_reduce(x); theirs.all_reduce(y)\n"
        "print('sums', x.item(), y.item())\n"
        "theirs.destroy_process_group(); phalanx.destroy_process_group()\n"
    )
    done = run("-n", 2, path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] sums 2.0 2.0" for rank in range(2)]


def test_modules_and_executables(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tool.py").write_text("import sys; print(__spec__.name, __name__, sys.argv[1:])")
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # which may be relative to here
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(os.path.abspath, places)))
    words = ("-n", 2, "--no-preload", "-m", "package.tool", "-x")
    done = run(*words, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "[rank 1] package.tool __main__ ['-x']" in done.stdout
    done = run("-n", 2, "--", "sh", "-c", "echo I am $RANK; exit $((RANK * 7))")
    assert done.returncode == 7
    assert "[rank 0] I am 0" in done.stdout
    assert "rank 1 of 2 exited with code 7" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "code", "facts"),
    [
        (["-n", 2, "missing.py"], 1, ["missing.py"]),
        (["-n", 2, "no-such-command"], 1, ["no-such-command"]),
        (["-n", "two", "x.py"], 2, ["auto", "two"]),
        (["-n", 2], 2, ["PROGRAM"]),
        (["--no-such-option", "x.py"], 2, ["phalanx run", "--no-such-option"]),
        (["--log-dir", __file__, "true"], 1, ["--log-dir", Path(__file__).name]),
        (["--trace", "/proc/nowhere", "true"], 1, ["--trace", "/proc/nowhere"]),
        (["--timeout", "soon", "x.py"], 2, ["soon", "15m"]),
        (["--nnodes", "2", "x.py"], 2, ["this machine"]),
        (["--replace", "nccl", "x.py"], 2, ["gloo"]),
    ],
)
def test_wrong_usage(arguments: list[object], code: int, facts: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    for fact in facts:
        assert fact in done.stderr


def test_progress_bars_in_a_pipe_show_what_became_of_them() -> None:
    done = run("--quiet", "--", "sh", "-c", r"printf ' 1%%\r 50%%\r100%%\nrest'")
    assert done.stdout == "[rank 0] 100%\n[rank 0] rest\n"
    assert done.stderr == ""


def test_jobs_side_by_side_get_ports_of_their_own() -> None:
    jobs = [
        subprocess.Popen(
            command("-q", "-n", 2, "--", "sh", "-c", "echo $MASTER_PORT; sleep 0.5"),
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(12)
    ]
    ports = [{line.split()[-1] for line in job.communicate()[0].splitlines()} for job in jobs]
    assert all(len(port) == 1 for port in ports)
    assert len(set.union(*ports)) == len(jobs)
    assert [job.returncode for job in jobs] == [0] * len(jobs)


def test_only_rank_0_reads_the_input(program: Written) -> None:
    path = program("import sys; print('read', repr(sys.stdin.read()))")
    done = run("-n", 2, path, input="words")
    assert sorted(done.stdout.splitlines()) == ["[rank 0] read 'words'", "[rank 1] read ''"]


def test_ranks_are_not_alike_by_being_forked(program: Written) -> None:
    path = program("import torch, numpy, random\nprint(numpy.random.rand(), random.random())")
    done = run("-n", 2, "-q", path)
    assert len({line.partition("] ")[2] for line in done.stdout.splitlines()}) == 2


def test_the_launcher_does_without_torch(program: Written) -> None:
    code = "import sys; from phalanx.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    words = [sys.executable, "-c", code, "run", str(program("import torch"))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert "phalanx.launch.run" in done.stdout.split()
    assert "torch" not in done.stdout.split()


def test_words_that_torchrun_knows() -> None:
    words = ["--nproc_per_node=2", "--nnodes", "1", "--node_rank=0", "--master_port=29500"]
    done = run(*words, "--rdzv-backend", "c10d", "--", "echo", "--", "x")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] -- x", "[rank 1] -- x"]


def test_ranks_import_torch_themselves_where_that_matters(program: Written, tmp_path: Path) -> None:
    path = program(
        "import os\n"
        "os.environ['OMP_NUM_THREADS'] = '1'\n"
        "import torch; print(torch.get_num_threads())\n"
    )
    assert run("-q", path).stdout == "[rank 0] 1\n"
    (tmp_path / "torch.py").write_text("raise ImportError('it is broken')")
    places = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run(program("import torch"), env=dict(os.environ, PYTHONPATH=places))
    assert done.returncode == 1
    assert f'File "{path}", line 1' in done.stderr
    assert done.stderr.splitlines()[-2] == "ImportError: it is broken"


def test_archives_and_directories(tmp_path: Path) -> None:
    (tmp_path / "__main__.py").write_text("import beside; print(__name__, beside.name)")
    (tmp_path / "beside.py").write_text("name = 'beside'")
    assert run("-q", tmp_path).stdout == "[rank 0] __main__ beside\n"


def test_a_question_stays_below_what_others_print(program: Written) -> None:
    path = program(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '0':\n"
        "    print('answer', input('question? '))\n"
        "else:\n"
        "    time.sleep(0.5); print('meanwhile')\n"
    )
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, command("-n", 2, path))
    seen = b""
    with suppress(OSError):  # the other side is closed
        while data := os.read(terminal, 1 << 16):
            seen += data
            if b"question" in seen.partition(b"meanwhile")[2] and b"answer" not in seen:
                os.write(terminal, b"yes\n")
    os.close(terminal)
    os.waitpid(child, 0)
    assert b"answer yes" in seen
