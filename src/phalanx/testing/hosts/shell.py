"""A remote shell between hosts, for launchers such as mpirun that start their ranks by ssh.

This file runs as a script: `serve` on every host, and `call HOST WORDS ...` in place of ssh, or
the file that CALLER names. The hosts' network reaches nobody else, so nobody is asked who they are.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import socket
import struct
import subprocess
import sys
import threading
from typing import NoReturn

CALLER = "/run/remote-shell"  # where every host has files of its own
PORT = 514
_EXIT, _STDOUT, _STDERR, _ORDER = range(4)


def serve() -> NoReturn:
    """Run the commands of whoever calls."""
    with open(CALLER, "w") as file:
        words = shlex.join([sys.executable, "-I", "-S", os.path.abspath(__file__), "call"])
        file.write(f'#!/bin/sh\nexec {words} "$@"\n')
    os.chmod(CALLER, 0o755)
    with socket.create_server(("", PORT)) as server:
        print("ready", flush=True)
        while True:
            link, _ = server.accept()
            if os.fork() == 0:
                if os.fork() == 0:  # whom the host's first process will bury
                    server.close()
                    _answer(link)
                os._exit(0)
            os.wait()
            link.close()


def _answer(link: socket.socket) -> NoReturn:
    _, size = struct.unpack("!BI", link.recv(5, socket.MSG_WAITALL))
    order = json.loads(link.recv(size, socket.MSG_WAITALL))
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        order["command"], shell=True, cwd=order["cwd"], stdin=pipe, stdout=pipe, stderr=pipe
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    streams = {child.stdout.fileno(): _STDOUT, child.stderr.fileno(): _STDERR}
    caller = link.fileno()
    sources = [caller, *streams]
    while sources not in ([], [caller]):
        for source in select.select(sources, [], [])[0]:
            data = os.read(source, 65536)
            if not data:
                sources.remove(source)
            if source != caller:
                _send(link, streams[source], data)
            elif data:
                os.write(child.stdin.fileno(), data)
            else:
                child.stdin.close()
    _send(link, _EXIT, bytes([child.wait() % 256]))
    os._exit(0)


def _send(link: socket.socket, kind: int, data: bytes) -> None:
    if data:
        link.sendall(struct.pack("!BI", kind, len(data)) + data)


def call(words: list[str]) -> int:
    """Run a command on another host as ssh does, and return its exit code."""
    while words and words[0].startswith("-"):  # what ssh would have been told
        del words[0]
    host, *command = words
    with socket.create_connection((host, PORT)) as link, link.makefile("rb") as answers:
        order = {"command": " ".join(command), "cwd": os.getcwd()}
        _send(link, _ORDER, json.dumps(order).encode())
        threading.Thread(target=_pass_on_input, args=(link,), daemon=True).start()
        while header := answers.read(5):
            kind, size = struct.unpack("!BI", header)
            data = answers.read(size)
            if kind == _EXIT:
                return data[0]
            os.write(kind, data)
    return 255


def _pass_on_input(link: socket.socket) -> None:
    while data := os.read(0, 65536):
        link.sendall(data)
    link.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else sys.exit(call(sys.argv[2:]))
