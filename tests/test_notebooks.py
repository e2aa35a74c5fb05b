"""Ranks in a notebook: functions of cells, what is below a cell, errors, the stop button."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import nbformat
import notebooks
import pytest
from notebooks import Cell, Notebook

EXAMPLES = Path(__file__).parent.parent / "examples"
CALLS = ["run_threads", "spawn"]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    with notebooks.opened(tmp_path_factory.mktemp("notebook")) as opened:
        opened.run(
            "import os, sys, time\nfrom pathlib import Path\n"
            "import torch\nimport phalanx as dist\nscale = 3"
        )
        yield opened


both = pytest.mark.parametrize("call", CALLS)


def of_rank(cell: Cell, rank: int, name: str = "stdout") -> list[str]:
    label = f"[rank {rank}] "
    return [line.removeprefix(label) for line in cell.lines(name) if line.startswith(label)]


@both
def test_a_function_of_a_cell_uses_what_other_cells_define(notebook: Notebook, call: str) -> None:
    notebook.run("def scaled(x):\n    return x * scale")
    cell = notebook.run(
        "def work(offset, *, times=1):\n"
        "    x = torch.tensor([float(scaled(dist.get_rank()) + offset)]) * times\n"
        "    dist.all_reduce(x)\n"
        "    return x.item(), dist.get_rank(), dist.get_world_size()\n"
        f"dist.{call}(work, 2, 1, times=2)"
    )
    assert (cell.value, cell.error) == ("[(10.0, 0, 2), (10.0, 1, 2)]", "")


@both
def test_a_function_that_is_defined_again_is_the_new_one(notebook: Notebook, call: str) -> None:
    for answer in ("old", "new"):
        notebook.run(f"word = {answer!r}\ndef say():\n    return word + '!'")
        assert notebook.run(f"dist.{call}(say, 2)").value == f"['{answer}!', '{answer}!']"


@both
def test_lines_are_labelled(notebook: Notebook, call: str) -> None:
    cell = notebook.run(
        "def speak():\n"
        "    for i in range(20):\n"
        "        for part in ('line ', str(i), '\\n'):\n"
        "            sys.stdout.write(part)\n"
        "    print('trouble', file=sys.stderr)\n"
        "    print('no end', end='')\n"
        f"_ = dist.{call}(speak, 3)\n"
        "print('not of a rank')"
    )
    for rank in range(3):
        assert of_rank(cell, rank) == [*(f"line {i}" for i in range(20)), "no end"]
        assert of_rank(cell, rank, "stderr") == ["trouble"]
    assert len(cell.lines()) == 3 * 21 + 1
    assert cell.lines()[-1] == "not of a rank"
    assert len(cell.lines("stderr")) == 3


def test_processes_are_labelled_below_python_too(notebook: Notebook) -> None:
    cell = notebook.run(
        "def speak():\n"
        "    os.write(1, b'descriptor\\n')\n"
        "    os.system('echo child; echo child in trouble >&2')\n"
        "_ = dist.spawn(speak, 2)"
    )
    for rank in range(2):
        assert of_rank(cell, rank) == ["descriptor", "child"]
        assert of_rank(cell, rank, "stderr") == ["child in trouble"]


@both
def test_labels_can_be_left_out(notebook: Notebook, call: str) -> None:
    cell = notebook.run(f"_ = dist.{call}(print, 1, 'plain', label=False)")
    assert "[rank" not in cell.text()


@both
def test_lines_are_there_as_they_are_printed(notebook: Notebook, call: str) -> None:
    go = notebook.folder / f"go-{call}"

    async def read_first(cell: Cell) -> None:
        await notebook.until(lambda: "[rank 1] ready" in cell.text())
        go.touch()

    cell = notebook.run(
        "def wait():\n"
        "    print('ready')\n"
        f"    while not Path({str(go)!r}).exists():\n"
        "        time.sleep(0.01)\n"
        "    return dist.get_rank()\n"
        f"dist.{call}(wait, 2)",
        read_first,
    )
    assert cell.value == "[0, 1]"


@both
def test_an_error_names_its_rank_and_the_line_of_the_cell(notebook: Notebook, call: str) -> None:
    cell = notebook.run(
        "def fail():\n"
        "    if dist.get_rank() == 1:\n"
        "        raise KeyError('no such batch')\n"
        "    dist.barrier()\n"
        f"dist.{call}(fail, 3)"
    )
    assert "rank 1 of 3" in cell.error
    assert cell.error.count("raise KeyError('no such batch')") >= 2  # in the cell, and where it was
    assert "PeerFailed" not in cell.error
    assert len(cell.error.splitlines()) < 30
    assert "threads.py" not in cell.error
    assert "processes.py" not in cell.error


@both
def test_the_stop_button_ends_all_ranks(notebook: Notebook, call: str) -> None:
    marks = [notebook.folder / f"{call}{rank}" for rank in range(2)]

    async def stop(cell: Cell) -> None:
        await notebook.until(lambda: all(mark.exists() for mark in marks))
        await notebook.interrupt()

    cell = notebook.run(
        "import os, threading\n"
        "def stay():\n"
        f"    mark = Path(f'{notebook.folder}/part{{dist.get_rank()}}')\n"
        "    mark.write_text(str(os.getpid()))\n"
        f"    mark.rename(f'{notebook.folder}/{call}{{dist.get_rank()}}')\n"
        "    if dist.get_rank() == 0:\n"
        "        dist.recv(torch.empty(1), 1)\n"
        "    while True:\n"
        "        time.sleep(0.01)\n"
        f"dist.{call}(stay, 2)",
        stop,
    )
    assert "KeyboardInterrupt" in cell.error
    assert "[rank" not in cell.text("stderr")
    if call == "spawn":
        for mark in marks:
            assert not os.path.exists(f"/proc/{mark.read_text()}/exe")
    names = notebook.run("[thread.name for thread in threading.enumerate()]").value
    assert "rank" not in str(names)
    assert notebook.run(f"dist.{call}(dist.get_rank, 2)").value == "[0, 1]"


@both
def test_of_a_progress_bar_its_last_state_is_left(notebook: Notebook, call: str) -> None:
    cell = notebook.run(
        "def advance():\n"
        "    for i in range(11):\n"
        "        print(f'\\r{i * 10}%', end='', file=sys.stderr, flush=True)\n"
        "    print(file=sys.stderr)\n"
        f"_ = dist.{call}(advance, 2)"
    )
    assert sorted(cell.lines("stderr")) == ["[rank 0] 100%", "[rank 1] 100%"]


def test_a_progress_bar_is_seen_while_it_advances(notebook: Notebook) -> None:
    go = notebook.folder / "advance"

    async def watch(cell: Cell) -> None:
        await notebook.until(lambda: cell.lines("stderr")[-1:] == ["[rank 0] 50%"])
        go.touch()

    cell = notebook.run(
        "def advance():\n"
        "    print('0%', end='', file=sys.stderr, flush=True)\n"
        "    print('\\r50%', end='', file=sys.stderr, flush=True)\n"
        f"    while not Path({str(go)!r}).exists():\n"
        "        time.sleep(0.01)\n"
        "    print('meanwhile', file=sys.stderr)\n"
        "    print('100%', file=sys.stderr)\n"
        "_ = dist.spawn(advance, 1)",
        watch,
    )
    assert cell.lines("stderr") == ["[rank 0] 50%meanwhile", "[rank 0] 100%"]


def test_programs_of_torch_are_labelled_too(notebook: Notebook) -> None:
    cell = notebook.run(
        "import torch.distributed\n"
        "from phalanx.testing import torch_world\n"
        "def work():\n"
        "    x = torch.ones(1)\n"
        "    torch.distributed.all_reduce(x)\n"
        "    print('sum', int(x))\n"
        "torch_world(2).run(work)"
    )
    assert (cell.value, cell.error) == ("[None, None]", "")
    assert sorted(cell.lines()) == ["[rank 0] sum 2", "[rank 1] sum 2"]


def test_as_torch_calls_it(notebook: Notebook) -> None:
    cell = notebook.run(
        "def work(rank, offset):\n"
        "    dist.init_process_group()\n"
        "    print('here')\n"
        "    return dist.get_rank() + offset\n"
        "context = dist.spawn(work, (5,), 2, join=False)\n"
        "context.join()\n"
        "context.results"
    )
    assert cell.value == "[5, 6]"
    assert sorted(cell.lines()) == ["[rank 0] here", "[rank 1] here"]


def test_classes_of_a_cell_come_back(notebook: Notebook) -> None:
    cell = notebook.run(
        "class Point:\n"
        "    def __init__(self, x):\n"
        "        self.x = x\n"
        "def make():\n"
        "    return Point(dist.get_rank())\n"
        "[(type(point) is Point, point.x) for point in dist.spawn(make, 2)]"
    )
    assert cell.value == "[(True, 0), (True, 1)]"


def test_what_is_missing_is_named(notebook: Notebook) -> None:
    cell = notebook.run(
        "kept = sys.modules.pop('cloudpickle', None)\n"
        "sys.modules['cloudpickle'] = None\n"
        "try:\n"
        "    dist.spawn(lambda: 1, 2)\n"
        "finally:\n"
        "    del sys.modules['cloudpickle']"
    )
    assert 'pip install "phalanx[notebook]"' in cell.error


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_example_runs(path: Path, tmp_path: Path) -> None:
    with notebooks.opened(tmp_path) as fresh:
        for node in nbformat.read(path, as_version=4).cells:
            if node.cell_type == "code":
                cell = fresh.run(node.source)
                expected = "raises-exception" in node.metadata.get("tags", [])
                assert bool(cell.error) == expected, cell.error
