"""Hosts as Linux namespaces that nothing but processes holds: when those end, nothing is left.

This file runs as a script, with the standard library alone. `keep` is the process that holds a
switch, a network namespace with a bridge in it, and has a child per host: the first process of the
host's own process namespace, which takes everything on the host with it when it ends. `enter`
becomes a program on a host.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from typing import Any, NoReturn

_FLAGS = {
    "user": 0x10000000,
    "net": 0x40000000,
    "mnt": 0x00020000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "pid": 0x20000000,
}
_BIND, _RECURSIVE, _PRIVATE = 4096, 16384, 1 << 18

# What every host has for itself, empty at first. What lies below them and is shared shines through.
PRIVATE_DIRECTORIES = ("/dev/shm", "/run", "/tmp", "/var/tmp")

_libc = ctypes.CDLL(None, use_errno=True)


class _Failed(Exception):
    """Something that a host needs cannot be done here."""


def _call(name: str, *arguments: Any, what: str) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        raise _Failed(f"{what}: {os.strerror(ctypes.get_errno())}")


def _unshare(*kinds: str) -> None:
    flags = sum(_FLAGS[kind] for kind in kinds)
    _call("unshare", flags, what=f"cannot make new namespaces ({', '.join(kinds)})")


def _mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    words = (source.encode(), target.encode(), kind.encode() or None, flags, options.encode())
    _call("mount", *words, what=f"cannot mount {kind or source} on {target}")


def _ip(lines: list[str]) -> None:
    """Have `ip` do these lines, all or an error."""
    done = subprocess.run(
        ["ip", "-batch", "-"], input="\n".join(lines), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise _Failed(f"ip could not set up the network: {done.stderr.strip()}")


def keep(plan: dict[str, Any]) -> None:
    """Make a switch and its hosts, say so on stdout, and stay until the parent has ended."""
    parent = os.pidfd_open(plan["parent"])
    if os.getppid() != plan["parent"]:
        return
    try:
        answer: dict[str, Any] = {"pids": _make(plan)}
    except (OSError, _Failed) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
    if "pids" in answer:
        select.select([parent], [], [])


def _make(plan: dict[str, Any]) -> list[int]:
    _make_switch_namespace()
    _ip(["link add name bridge0 type bridge", "link set dev bridge0 up", "link set dev lo up"])
    links: list[socket.socket] = []
    pids = []
    for number, host in enumerate(plan["hosts"]):
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            for other in [*links, ours]:  # a host ends when the other end of its link is closed
                other.close()
            _be_host(host, plan, theirs)
        theirs.close()
        links.append(ours)
        pids.append(int(_hear(ours)))
        _ip(
            [
                f"link add name port{number} type veth peer name eth0"
                f" address {host['mac']} netns {pids[-1]}",
                f"link set dev port{number} master bridge0",
                f"link set dev port{number} up",
            ]
        )
        ours.send(b"go")
    for link in links:
        if (problem := _hear(link)) != "ready":
            raise _Failed(problem)
    _links.extend(links)
    return pids


_links: list[socket.socket] = []  # held open for the life of the hosts


def _make_switch_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    try:
        _unshare("net")
        return
    except _Failed as error:
        needs_user_namespace = error
    try:
        _unshare("user", "net")
    except _Failed as error:
        raise _Failed(
            f"{needs_user_namespace}; {error}; "
            "be root with CAP_SYS_ADMIN and CAP_NET_ADMIN, or allow user namespaces"
        ) from None
    for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def _hear(link: socket.socket) -> str:
    text = link.recv(4096).decode()
    if not text:
        raise _Failed("a host ended while it was made")
    return text


def _be_host(host: dict[str, Any], plan: dict[str, Any], link: socket.socket) -> NoReturn:
    """Be the parent of a host's first process, and that process."""
    try:
        _unshare("net", "mnt", "uts", "ipc", "pid")
        first = os.fork()
    except (OSError, _Failed) as error:
        link.send(str(error).encode())
        os._exit(1)
    if first:
        link.send(str(first).encode())
        link.close()
        os.waitpid(first, 0)
        os._exit(0)
    if link.recv(4096):
        try:
            _furnish(host, plan)
            link.send(b"ready")
        except (OSError, _Failed) as error:
            link.send(f"{host['name']}: {error}".encode())
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, _reap)
    _reap()
    link.recv(1)  # until the keeper has ended
    os._exit(0)


def _reap(*_: object) -> None:
    """Bury orphans, which the kernel leaves to the first process."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _furnish(host: dict[str, Any], plan: dict[str, Any]) -> None:
    name = host["name"].encode()
    _call("sethostname", name, len(name), what="cannot set the name of the host")
    # IPv6 would take seconds to find out that nobody else has its address.
    ipv6 = "/proc/sys/net/ipv6/conf/eth0/disable_ipv6"
    if os.path.exists(ipv6):
        with open(ipv6, "w") as file:
            file.write("1")
    _ip(
        [
            "link set dev lo up",
            f"addr add {host['address']}/24 dev eth0",
            "link set dev eth0 up",
        ]
    )
    _mount("none", "/", flags=_RECURSIVE | _PRIVATE)
    opened = [(path, os.open(path, os.O_PATH)) for path in plan["shared"]]
    if os.path.isdir("/sys/fs/cgroup"):
        opened.append(("/sys/fs/cgroup", os.open("/sys/fs/cgroup", os.O_PATH)))
    _mount("sysfs", "/sys", "sysfs")  # whose /sys/class/net is this host's
    for directory in filter(os.path.isdir, PRIVATE_DIRECTORIES):
        _mount("tmpfs", directory, "tmpfs", options="mode=1777")
    for path, descriptor in opened:
        _show(descriptor, path)
    with open("/run/hosts", "w") as file:
        file.write(host["names"])
    _mount("/run/hosts", "/etc/hosts", flags=_BIND)
    _mount("proc", "/proc", "proc")


def _show(descriptor: int, path: str) -> None:
    """Show what was opened before at its place again."""
    source = f"/proc/self/fd/{descriptor}"
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "a").close()
    _mount(source, path, flags=_BIND | _RECURSIVE)
    os.close(descriptor)


def join(pid: int, kinds: list[str], directory: str) -> None:
    """Move this process into namespaces of another; into that of process ids, its next child."""
    if os.readlink(f"/proc/{pid}/ns/user") != os.readlink("/proc/self/ns/user"):
        kinds = ["user", *kinds]
    opened = [(kind, os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)) for kind in kinds]
    for kind, descriptor in opened:
        _call("setns", descriptor, _FLAGS[kind], what=f"cannot enter the namespace {kind}")
        os.close(descriptor)
    if "mnt" in kinds:
        os.chdir(directory)


def fork(told: int) -> None:
    """Go on as a child, whose pid is written to a descriptor; the parent ends as the child does.

    The child is killed when the parent is.
    """
    child = os.fork()
    if child == 0:
        os.close(told)
        _call("prctl", 1, int(signal.SIGKILL), 0, 0, 0, what="cannot be killed with the parent")
        return
    os.write(told, str(child).encode())
    os.close(told)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def enter(
    pid: int, kinds: list[str], told: int | None, directory: str, words: list[str]
) -> NoReturn:
    """Become a program in namespaces of a process, or if its pid is to be `told`, its parent."""
    join(pid, kinds, directory)
    if told is not None:
        fork(told)
    _become(words)


def _become(words: list[str]) -> NoReturn:
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python
        signal.signal(ignored, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    try:
        if sys.argv[1] == "keep":
            keep(json.load(sys.stdin))
        else:
            enter(**json.loads(sys.argv[2]))
    except (OSError, _Failed) as error:
        sys.exit(str(error))
