"""Checks of what is installed: versions, the native core, what may look at other processes."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from phalanx.doctor.findings import Host, Said, good, problem, warning
from phalanx.extras import install

# From the oldest torch that can work to the newest that all tests have passed with.
OLDEST_TORCH, NEWEST_TORCH = (2, 10), (2, 13)
OLDEST_PYTHON = (3, 10)


def python(host: Host) -> Iterator[Said]:
    """Tell which Python runs this, on which system."""
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    fact = f"Python {platform.python_version()} on {system}"
    if sys.version_info < OLDEST_PYTHON:
        yield problem(fact, f"use Python {_dotted(OLDEST_PYTHON)} or newer")
    else:
        yield good(fact)


def torch(host: Host) -> Iterator[Said]:
    """See whether torch is one that Phalanx was tested with."""
    version = host.version("torch")
    if version is None:
        yield problem("torch is not installed", f"pip install 'torch>={_dotted(OLDEST_TORCH)}'")
        return
    number = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if number < OLDEST_TORCH:
        yield problem(
            f"torch {version} is too old", f"pip install 'torch>={_dotted(OLDEST_TORCH)}'"
        )
    elif number > NEWEST_TORCH:
        yield warning(
            f"torch {version} is newer than those tested ({_dotted(NEWEST_TORCH)})",
            f"should something fail: pip install 'torch=={_dotted(NEWEST_TORCH)}.*'",
        )
    else:
        yield good(f"torch {version}")


def others(host: Host) -> Iterator[Said]:
    """Tell which of the packages are there that some commands need."""
    numpy = host.version("numpy")
    if numpy is None:
        yield problem("numpy is not installed", "pip install numpy")
    else:
        yield good(f"numpy {numpy}")
    mpi4py = host.version("mpi4py")
    if mpi4py is None:
        yield good(f"no mpi4py; phalanx bench --against mpi needs it: {install('bench')}")
    elif _launcher() is None:
        yield warning(f"mpi4py {mpi4py}, but no mpirun", install("bench"))
    else:
        yield good(f"mpi4py {mpi4py}, {_launcher()}")


def _launcher() -> str | None:
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


def core(host: Host) -> Iterator[Said]:
    """Load the native core and ask which vector instructions it uses."""
    try:
        from phalanx import _native
    except ImportError as error:
        yield problem(
            f"the native core cannot be loaded: {error}",
            "pip install --force-reinstall --no-deps phalanx, or in a checkout: scripts/build",
        )
        return
    instructions = _native.instructions()
    if instructions == "baseline":
        yield warning(
            "the native core uses no AVX2: reductions take about twice as long",
            "use a machine with AVX2, or let the virtual machine see it (-cpu host)",
        )
    else:
        yield good(f"the native core reduces with {instructions}")


def backend(host: Host) -> Iterator[Said]:
    """See whether torch finds the backend "phalanx" when it is imported."""
    if host.environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield warning(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch does not look for backends",
            'unset TORCH_DEVICE_BACKEND_AUTOLOAD, or "import phalanx.torch_backend" in the program',
        )
        return
    entries = [entry for entry in host.entry_points("torch.backends") if entry.name == "phalanx"]
    advice = 'pip install phalanx, or "import phalanx.torch_backend" in the program'
    if not entries:
        yield warning(
            'torch does not find the backend "phalanx": the package is not installed here', advice
        )
        return
    try:
        entries[0].load()
    except (ImportError, AttributeError) as error:
        yield warning(f'torch cannot load the backend "phalanx": {error}', advice)
        return
    yield good('torch finds the backend "phalanx" by itself')


def stacks(host: Host) -> Iterator[Said]:
    """See whether `phalanx why` can show the Python stacks of ranks."""
    if host.version("py-spy") is None and shutil.which("py-spy") is None:
        yield good(f"no py-spy; with it, phalanx why shows stacks: {install('why')}")
        return
    scope = host.number("/proc/sys/kernel/yama/ptrace_scope")
    if scope in (None, 0) or (scope in (1, 2) and host.is_root):
        yield good("py-spy may look at ranks")
    else:
        yield warning(
            f"ptrace is restricted (yama scope {scope}): phalanx why cannot show stacks",
            "sudo phalanx why JOB, or: sudo sysctl kernel.yama.ptrace_scope=0"
            if scope != 3
            else "scope 3 cannot be lowered until the machine is started anew",
        )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
