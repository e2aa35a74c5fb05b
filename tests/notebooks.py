"""A notebook with a kernel of its own, for tests."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import phalanx

KERNEL = "under-test"


class Cell:
    """What became of a cell."""

    def __init__(self, source: str) -> None:
        self.node: Any = nbformat.v4.new_code_cell(source)

    @property
    def outputs(self) -> list[Any]:
        return list(self.node.outputs)

    def text(self, name: str = "stdout") -> str:
        """Return what is below the cell as "stdout" or "stderr", without colours."""
        found = [out.text for out in self.outputs if out.get("name") == name]
        return plain("".join(found))

    def lines(self, name: str = "stdout") -> list[str]:
        """Return the lines as they are seen, where a carriage return lets them be overwritten."""
        lines = self.text(name).split("\n")
        return [line.rpartition("\r")[2] for line in lines if line]

    @property
    def value(self) -> str | None:
        """How the last expression is shown."""
        for out in self.outputs:
            if out.output_type == "execute_result":
                return str(out.data["text/plain"])
        return None

    @property
    def error(self) -> str:
        """The traceback, or nothing."""
        for out in self.outputs:
            if out.output_type == "error":
                return plain("\n".join(out.traceback))
        return ""


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


class Notebook:
    """Runs cells one after the other, in a kernel that is this Python."""

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.folder = folder
        self._loop = loop
        self.client = NotebookClient(
            nbformat.v4.new_notebook(),
            kernel_name=KERNEL,
            timeout=100,
            resources={"metadata": {"path": str(folder)}},
        )

    def run(self, source: str, meanwhile: Callable[[Cell], Any] | None = None) -> Cell:
        """Run a cell, and meanwhile what returns a coroutine."""
        cell = Cell(source)
        return self._loop.run_until_complete(self._run(cell, meanwhile))

    async def _run(self, cell: Cell, meanwhile: Callable[[Cell], Any] | None) -> Cell:
        self.client.nb.cells.append(cell.node)
        index = len(self.client.nb.cells) - 1
        task = asyncio.ensure_future(self.client.async_execute_cell(cell.node, index))
        try:
            if meanwhile is not None:
                await meanwhile(cell)
            await task
        except CellExecutionError:
            pass  # it is among the outputs
        finally:
            task.cancel()
        return cell

    async def interrupt(self) -> None:
        """Do what the button does."""
        await self.client.km.interrupt_kernel()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, for which the cell may need to go on."""
        while not condition():
            await asyncio.sleep(0.01)


@contextmanager
def opened(folder: Path) -> Iterator[Notebook]:
    """Start a kernel that works in a folder."""
    spec = folder / "jupyter" / "kernels" / KERNEL
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": KERNEL}))
    runtime = tempfile.TemporaryDirectory(prefix="kernel-")  # sockets want short paths
    ours = {
        "JUPYTER_PATH": str(folder / "jupyter"),
        "JUPYTER_RUNTIME_DIR": runtime.name,
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONPATH": str(Path(phalanx.__file__).parents[1]),
    }
    before = dict(os.environ)
    os.environ.update(ours)
    loop = asyncio.new_event_loop()
    notebook = Notebook(folder, loop)
    client = notebook.client
    try:
        client.create_kernel_manager()
        client.km.transport, client.km.ip = "ipc", f"{runtime.name}/kernel"
        loop.run_until_complete(client.async_start_new_kernel(cwd=str(folder)))
        loop.run_until_complete(client.async_start_new_kernel_client())
        yield notebook
    finally:
        if client.kc is not None:
            client.kc.stop_channels()
        loop.run_until_complete(client.km.shutdown_kernel(now=True))
        loop.close()
        runtime.cleanup()
        os.environ.clear()
        os.environ.update(before)
