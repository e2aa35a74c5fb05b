"""Who may speak on Gloo's connections: processes that know nothing of the job try to."""

import logging
import os
import re
import socket
import struct
import threading
from contextlib import suppress

import pytest
import torch

import phalanx as dist
from phalanx.backends.engines import frames, proofs, torch_engine
from phalanx.testing.ranks import run_ranks

# How Gloo's messages begin: bytes in all, what it is, tag, offset, bytes of the message, offset.
HEADER = struct.Struct("=6Q")
SEND, READY_TO_SEND, READY_TO_RECEIVE = 1, 2, 3


class Stranger:
    """Connects to Gloo's ports before the ranks do, and speaks Gloo's protocol in their place."""

    def __init__(self, manner: str) -> None:
        self._manner = manner
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.asked: list[int] = []  # the tags of the messages that it was asked for
        self.attacks = 0

    def attack(self, told: bytes) -> None:
        """Take the places of all peers at the address that Gloo is about to tell them."""
        self.attacks += 1
        found = re.search(rb"\x02\x00(..)(....)\0{8}", told, re.DOTALL)
        assert found
        place = socket.inet_ntoa(found[2]), int.from_bytes(found[1], "big")
        for number in range(6):
            # Taken in order: the first one has come when the last has been answered or not.
            connection = socket.create_connection(place, timeout=30)
            connection.sendall(struct.pack("=q", number))
            self._sockets.append(connection)
            if self._manner != "silent":
                thread = threading.Thread(target=self._speak, args=[connection])
                self._threads.append(thread)
                thread.start()

    def _speak(self, connection: socket.socket) -> None:
        def read(count: int) -> bytes:
            data = b""
            while len(data) < count:
                part = connection.recv(count - len(data))
                if not part:
                    raise EOFError
                data += part
            return data

        with suppress(OSError, EOFError):
            while True:
                _, kind, tag, _, length, _ = HEADER.unpack(read(HEADER.size))
                if kind == SEND:
                    said = read(length)
                    if self._manner == "mirror":
                        self._send(connection, tag, said)
                elif kind == READY_TO_SEND:
                    connection.sendall(HEADER.pack(HEADER.size, READY_TO_RECEIVE, tag, 0, 0, 0))
                elif tag == 0:
                    self.asked.append(tag)
                    message = frames.pack(frames.MESSAGE, 0, 8, 0, b"", b"STRANGER")
                    self._send(connection, tag, message.numpy().tobytes())
                else:
                    self.asked.append(tag)
                    if self._manner == "guess":
                        self._send(connection, tag, os.urandom(length))

    @staticmethod
    def _send(connection: socket.socket, tag: int, data: bytes) -> None:
        header = HEADER.pack(HEADER.size + len(data), SEND, tag, 0, len(data), 0)
        connection.sendall(header + data)

    def end(self) -> None:
        for connection in self._sockets:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def attacked(monkeypatch):
    """Have a stranger attack every rank of a group, in so many attempts to connect."""
    strangers = []

    def begin(manner: str, ranks: int, attempts: int) -> Stranger:
        stranger = Stranger(manner)
        strangers.append(stranger)
        left = [ranks] * attempts
        lock = threading.Lock()
        tell = torch_engine._GlooStore.set

        def told(self, key, value):
            with lock:
                found = re.search(r"gloo0\.(\d+)", str(self._ours._prefix))
                attempt = int(found[1]) if found else attempts
                if attempt < attempts and left[attempt]:
                    left[attempt] -= 1
                    stranger.attack(torch_engine._raw(value))
            tell(self, key, value)

        monkeypatch.setattr(torch_engine._GlooStore, "set", told)
        monkeypatch.setattr(proofs, "_PROOF_SECONDS", 1.0)
        return stranger

    yield begin
    for stranger in strangers:
        stranger.end()


def hear_from_the_next():
    rank, size = dist.get_rank(), dist.get_world_size()
    work = dist.isend(torch.full((8,), rank + 40, dtype=torch.uint8), (rank - 1) % size)
    received = torch.zeros(8, dtype=torch.uint8)
    dist.recv(received, (rank + 1) % size)
    work.wait()
    return bytes(received.tolist())


@pytest.mark.parametrize("manner", ["guess", "mirror", "silent"])
def test_a_stranger_in_a_rank_s_place_is_dropped_and_the_job_goes_on(attacked, caplog, manner):
    stranger = attacked(manner, ranks=2, attempts=1)
    with caplog.at_level(logging.WARNING, "phalanx.engines"):
        results = run_ranks(hear_from_the_next, 2, backend="gloo")
    assert results == [bytes([41] * 8), bytes([40] * 8)]
    assert stranger.attacks == 2
    assert 0 not in stranger.asked  # no rank has asked a stranger for a frame
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1
    assert re.search(r"group 'world'.*rank [01].*belongs to the job", warnings[0])


def test_strangers_that_come_again_and_again_are_an_error_on_every_rank(attacked):
    stranger = attacked("guess", ranks=3, attempts=3)
    for error in run_ranks(hear_from_the_next, 3, backend="gloo", return_exceptions=True):
        assert isinstance(error, dist.DistNetworkError)
        assert "not of this job connects to the ports" in str(error)
        assert "GLOO_SOCKET_IFNAME" in str(error)
    assert stranger.attacks == 9
    assert 0 not in stranger.asked


def test_three_ranks_of_which_one_is_attacked(attacked):
    attacked("guess", ranks=1, attempts=1)
    results = run_ranks(hear_from_the_next, 3, backend="gloo")
    assert results == [bytes([41] * 8), bytes([42] * 8), bytes([40] * 8)]


def listening() -> set[tuple[str, int]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(each.getsockname())
    return found


def test_nobody_connects_to_a_group_that_is_made():
    before = listening()

    def body():
        dist.barrier()
        ports = listening() - before
        for place in ports:
            with pytest.raises(TimeoutError):
                socket.create_connection(place, timeout=0.2)
        dist.barrier()
        return {address for address, _ in ports}

    # Ranks of one machine listen where no other can connect.
    assert run_ranks(body, 2, backend="gloo") == [{"127.0.0.1"}] * 2


def test_an_answer_holds_for_one_connection_and_one_direction():
    def answer(attempt, group, who, whom, own, other, token=b"t"):
        told = dist_options(who)
        one = proofs._Proofs(told, token, attempt, [None, None], str)
        return one._answer(group, who, whom, own, other)

    def dist_options(rank):
        from phalanx.backends.registry import BackendOptions
        from phalanx.stores import HashStore

        return BackendOptions(
            store=HashStore(),
            group_rank=rank,
            group_size=3,
            timeout=1.0,
            group_id="some",
            global_ranks=[0, 1, 2],
            threads=True,
        )

    right = answer(0, 0, 1, 2, b"a", b"b")
    assert right == answer(0, 0, 1, 2, b"a", b"b")
    others = [
        answer(1, 0, 1, 2, b"a", b"b"),
        answer(0, 1, 1, 2, b"a", b"b"),
        answer(0, 0, 2, 1, b"a", b"b"),
        answer(0, 0, 1, 0, b"a", b"b"),
        answer(0, 0, 1, 2, b"b", b"a"),
        answer(0, 0, 1, 2, b"a", b"b", token=b"u"),
    ]
    assert right not in others
    assert len(set(others)) == len(others)
