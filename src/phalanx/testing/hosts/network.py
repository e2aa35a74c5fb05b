"""Hosts on one machine, and the network between them."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, Literal

from phalanx.launch.processes import pack_task
from phalanx.stores import secret
from phalanx.testing.hosts import namespaces, shell
from phalanx.testing.hosts.jobs import Job
from phalanx.testing.hosts.programs import Command, HostError, Program, environment, script
from phalanx.testing.hosts.rank import FunctionProgram, Task
from phalanx.testing.hosts.switch import Link, Switch, batch

_PORT = 29500
_MOST = 200  # hosts in one network: their addresses differ in the last number
_PATIENCE = 30.0  # seconds for what takes a fraction of one

Names = Literal["all", "loopback", "none"]


class Host:
    """One of several hosts on this machine: its own network, files, process ids and name.

    `name` is host0, host1, ...; `address` is where the others reach it.
    """

    def __init__(self, network: Hosts, number: int, pid: int) -> None:
        self.number = number
        self.name, self.address = _name(number), _address(number)
        self._network = network
        self._pid = pid
        self._ended = os.pidfd_open(pid)

    @property
    def alive(self) -> bool:
        """Whether it runs: it has not been killed."""
        return self._ended >= 0

    def start(
        self,
        words: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> Program:
        """Start a command on the host and return it; `env` is added to this process's variables."""
        self._must_live()
        return self._network._remember(Command(self._pid, words, self.name, env, cwd))

    def _start_function(self, env: Mapping[str, str], task: Task) -> Program:
        self._must_live()
        program = FunctionProgram(self._pid, self.name, {**environment(), **env}, task)
        return self._network._remember(program)

    def run(
        self,
        words: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float = 60,
        check: bool = True,
    ) -> Program:
        """Run a program on the host to its end; unless it exits with code 0, raise HostError."""
        program = self.start(words, env=env, cwd=cwd)
        try:
            if check:
                program.check(timeout)
            else:
                program.wait(timeout)
        finally:
            program.close()
        return program

    def cut(self) -> None:
        """Pull the plug of its network: nobody hears of it any more, and it of nobody."""
        self._plug("down")

    def heal(self) -> None:
        """Put the plug in again."""
        self._plug("up")

    def _plug(self, state: Literal["up", "down"]) -> None:
        self._must_live()
        self._network._switch.plug(self.number, state)

    def block(self, other: Host) -> None:
        """Drop, as a firewall does, all that this host and another one send each other."""
        for one, peer in ((self, other), (other, self)):
            nobody = f"neigh replace {peer.address} lladdr {_mac(255)} dev eth0 nud permanent"
            one.batch("ip", [nobody])

    def unblock(self, other: Host) -> None:
        """Let the two reach each other again."""
        for one, peer in ((self, other), (other, self)):
            one.batch("ip", [f"neigh del {peer.address} dev eth0"])

    def kill(self) -> None:
        """Switch it off: all that runs there ends at once, and no last word reaches anybody."""
        self.cut()
        self._network._switch.remove(self.number)
        self._end()

    def batch(self, command: Literal["ip", "tc"], lines: list[str]) -> None:
        """Have the host's `ip` or `tc` do these lines."""
        self._must_live()
        batch(self._pid, self.name, command, lines)

    def _must_live(self) -> None:
        if not self.alive:
            raise HostError(f"{self.name} was killed: nothing can be done with it any more")

    def _end(self) -> None:
        if self.alive:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._ended, signal.SIGKILL)
            wait([self._ended], _PATIENCE)
            os.close(self._ended)
            self._ended = -1

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}{'' if self.alive else ', killed'}>"


class Hosts:
    """Several hosts on this machine, in a network of their own, for tests and measurements.

    Each has its own network, processes, hostname, /tmp, /var/tmp, /run and /dev/shm; other files
    are the same everywhere, as on a network file system. What lies below those directories and a
    program needs, as the Python environment and the working directory, is seen as well, and so is
    what is named as `shared`. The machine's own network cannot be reached.

    `rate`, `delay` and `loss` are the links', as for `shape`. `ranks` says how many ranks `launch`
    starts on each host, or on which how many. `names`: "all" hosts know each other's names,
    "loopback" gives a host's own name the address 127.0.1.1, as some systems do, and with "none" no
    name leads anywhere.

    As a context manager it leaves nothing behind; nor does it if the process is killed.
    It needs Linux, the command `ip` and either root or user namespaces: `unavailable` tells.
    """

    def __init__(
        self,
        size: int,
        *,
        ranks: int | Sequence[int] = 1,
        rate: str | None = None,
        delay: float = 0.0,
        loss: float = 0.0,
        shared: Sequence[str | os.PathLike[str]] = (),
        names: Names = "all",
    ) -> None:
        if not 1 <= size <= _MOST:
            raise ValueError(f"a network has 1 to {_MOST} hosts, got {size}")
        if names not in ("all", "loopback", "none"):
            raise ValueError(f"unknown names {names!r} (known: all, loopback, none)")
        self.ranks = _by_host(ranks, size)
        self._programs: list[Program] = []
        self._jobs = 0
        self._keeper, pids = _keep(size, _visible(shared), names)
        self._switch = Switch(self._keeper.pid, size)
        self._hosts = [Host(self, number, pid) for number, pid in enumerate(pids)]
        try:
            if rate or delay or loss:
                self.shape(rate=rate, delay=delay, loss=loss)
        except BaseException:
            self.close()
            raise

    @staticmethod
    @functools.cache
    def unavailable() -> str:
        """Return why hosts cannot be made here, in words for a skipped test, or ""."""
        if not sys.platform.startswith("linux"):
            return f"hosts are made of Linux namespaces, and this is {sys.platform}"
        if shutil.which("ip", path=environment()["PATH"]) is None:
            return "the command `ip` is missing: install iproute2"
        try:
            Hosts(2).close()
        except HostError as error:
            return str(error)
        return ""

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self,
        program: Callable[..., Any] | Sequence[str | os.PathLike[str]],
        *args: Any,
        ranks: int | Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
        backend: str | None = None,
        group_timeout: float | timedelta | None = None,
        **kwargs: Any,
    ) -> Job:
        """Start a function or a command on several ranks of each host; see `launch`."""
        counts = self.ranks if ranks is None else _by_host(ranks, len(self))
        places = [host for host, count in zip(self, counts, strict=True) for _ in range(count)]
        common = {secret.VARIABLE: secret.token(), **(env or {})}
        variables = [{**common, **each} for each in self._variables(counts)]
        self._jobs += 1
        programs: list[Program] = []
        try:
            if callable(program):
                name = getattr(program, "__qualname__", repr(program))
                task = Task(pack_task(program, args, kwargs), name, backend, group_timeout)
                for host, each in zip(places, variables, strict=True):
                    programs.append(host._start_function(each, task))
            else:
                for host, each in zip(places, variables, strict=True):
                    programs.append(host.start([*program, *args], env=each))
        except BaseException:
            for started in programs:
                started.close()
            raise
        return Job(programs)

    def _remember(self, program: Program) -> Program:
        self._programs.append(program)
        return program

    def launch(
        self,
        program: Callable[..., Any] | Sequence[str | os.PathLike[str]],
        *args: Any,
        ranks: int | Sequence[int] | None = None,
        env: Mapping[str, str] | None = None,
        backend: str | None = None,
        group_timeout: float | timedelta | None = None,
        timeout: float = 60,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a function or a command on several ranks of each host; return the results by rank.

        Ranks are told by the variables of torchrun who they are and where host0 is. A function is
        called as `program(*args, **kwargs)`; with a `backend` the default group is initialised
        before it, with `group_timeout`. A command, such as `[sys.executable, "train.py"]`, gets
        `args` as further words, and what it prints is its result. How they end, and what `timeout`
        and `return_exceptions` mean, is told by `Job.wait`.
        """
        job = self.start(
            program,
            *args,
            ranks=ranks,
            env=env,
            backend=backend,
            group_timeout=group_timeout,
            **kwargs,
        )
        return job.wait(timeout, return_exceptions=return_exceptions)

    def _variables(self, counts: list[int]) -> Iterator[dict[str, str]]:
        size = sum(counts)
        for number, count in enumerate(counts):
            for local_rank in range(count):
                values = {
                    "RANK": sum(counts[:number]) + local_rank,
                    "WORLD_SIZE": size,
                    "LOCAL_RANK": local_rank,
                    "LOCAL_WORLD_SIZE": count,
                    "GROUP_RANK": number,
                    "GROUP_WORLD_SIZE": len(counts),
                    "MASTER_ADDR": self[0].address,
                    "MASTER_PORT": _PORT + self._jobs % 1000,  # what the last job left may linger
                }
                yield {name: str(value) for name, value in values.items()}

    def shape(self, *, rate: str | None = None, delay: float = 0.0, loss: float = 0.0) -> None:
        """Make the links between hosts and switch slow, long or bad, from now on.

        `rate` is a link's in each direction, as "100mbit" or "10gbit". `delay` is how many seconds
        each packet takes from host to host, `loss` the fraction of packets that get lost. Where the
        kernel has no netem, a program forwards the packets instead. Without arguments links are as
        fast as the machine.
        """
        link = Link.read(rate, delay, loss)
        for host in self:
            if host.alive:
                host.batch("ip", link.segments("eth0"))
                host.batch("tc", [link.queue("eth0")])
        self._switch.shape(link)

    def firewall(self, open_ports: Sequence[int] | None) -> None:
        """Let hosts make TCP connections to each other on these ports alone; None: on all."""
        self._switch.firewall(open_ports)

    def remote_shell(self) -> str:
        """Return a command that programs on hosts can use like ssh, to run others on other hosts.

        It is for launchers: `mpirun --mca plm_ssh_agent ...`, and `-launcher-exec` for MPICH's.
        """
        for host in self:
            server = host.start(script(shell, "serve"))
            while not server.stdout:
                if server.returncode is not None:
                    raise HostError(f"{server} {server.ending}{server.told()}")
                time.sleep(0.01)
        return shell.CALLER

    def close(self) -> None:
        """End all hosts and what runs on them. What programs have printed can still be read."""
        for host in self:
            host._end()
        for program in self._programs:
            program.close()
        self._switch.close()
        self._keeper.kill()
        self._keeper.wait()


def _name(number: int) -> str:
    return f"host{number}"


def _address(number: int) -> str:
    return f"10.77.0.{number + 1}"


def _mac(number: int) -> str:
    return f"02:70:68:61:00:{number:02x}"


def _by_host(ranks: int | Sequence[int], size: int) -> list[int]:
    counts = [ranks] * size if isinstance(ranks, int) else list(ranks)
    if len(counts) != size or min(counts) < 0 or not sum(counts):
        raise ValueError(f"ranks must be a number, or one for each of {size} hosts, got {ranks!r}")
    return counts


def _visible(shared: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return what must be shown on hosts because it lies in a directory that hosts have anew."""
    program = getattr(sys.modules["__main__"], "__file__", None) or ""
    needed = [os.getcwd(), program, sys.prefix, sys.base_prefix, *sys.path, *shared]
    paths = {os.path.abspath(path) for path in needed if path and os.path.exists(path)}
    paths |= {os.path.realpath(path) for path in paths}
    found: list[str] = []
    for path in sorted(paths):
        hidden = any(path.startswith(f"{top}/") for top in namespaces.PRIVATE_DIRECTORIES)
        if hidden and not any(path.startswith(f"{above}/") for above in found):
            found.append(path)
    return found


def _names(number: int, size: int, names: Names) -> str:
    """Return the file /etc/hosts of a host."""
    lines = ["127.0.0.1 localhost"]
    if names == "loopback":
        lines.append(f"127.0.1.1 {_name(number)}")
    if names != "none":
        others = [other for other in range(size) if names == "all" or other != number]
        lines += [f"{_address(other)} {_name(other)}" for other in others]
    return "".join(f"{line}\n" for line in lines)


def _keep(size: int, shared: list[str], names: Names) -> tuple[subprocess.Popen[str], list[int]]:
    """Start the process that keeps hosts, and return it with the first process of each."""
    hosts = [
        {
            "name": _name(number),
            "address": _address(number),
            "mac": _mac(number),
            "names": _names(number, size, names),
        }
        for number in range(size)
    ]
    plan = {"parent": os.getpid(), "hosts": hosts, "shared": shared}
    keeper = subprocess.Popen(
        script(namespaces, "keep"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
        text=True,
        start_new_session=True,
    )
    assert keeper.stdin is not None
    assert keeper.stdout is not None
    assert keeper.stderr is not None
    with keeper.stdout, keeper.stderr:
        with keeper.stdin:
            json.dump(plan, keeper.stdin)
        answer = json.loads(keeper.stdout.readline() or "{}")
        if "pids" not in answer:
            keeper.wait()
            said = answer.get("error") or keeper.stderr.read().strip()
            raise HostError(f"hosts cannot be made here: {said}")
    return keeper, answer["pids"]
