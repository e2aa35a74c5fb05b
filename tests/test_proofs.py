"""Who may speak on Gloo's connections: processes that know nothing of the job try to."""

import logging
import os
import re
import resource
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

import phalanx as dist
from phalanx.backends.engines import addresses, frames, ports, proofs, torch_engine
from phalanx.backends.registry import BackendOptions
from phalanx.stores import HashStore, secret
from phalanx.stores.addresses import host_address, is_loopback
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


def options(rank, size, store):
    return BackendOptions(
        store=store,
        group_rank=rank,
        group_size=size,
        timeout=30.0,
        group_id="some",
        global_ranks=list(range(size)),
        threads=True,
    )


def test_ranks_with_different_secrets_do_not_get_together(monkeypatch):
    words = iter(["one", "another"] * 3)
    monkeypatch.setattr(proofs.secret, "mixed", lambda token: token + next(words))
    for error in run_ranks(hear_from_the_next, 2, backend="gloo", return_exceptions=True):
        assert isinstance(error, dist.DistNetworkError)
        assert "set PHALANX_SECRET to the same value" in str(error)


class OpenStore(HashStore):
    is_open = True


@pytest.mark.parametrize("kind", [HashStore, OpenStore])
def test_ranks_that_meet_in_an_open_store_say_so(monkeypatch, caplog, kind):
    """As those of torch's on several hosts do, whose Gloo listens where others reach it."""
    address = host_address()
    if is_loopback(address):
        pytest.skip("this machine has no address that others reach")
    monkeypatch.setattr(addresses, "address_of", lambda name: None)
    monkeypatch.setattr(secret, "_warned", False)
    monkeypatch.delenv("PHALANX_SECRET", raising=False)
    caplog.set_level(logging.WARNING, "phalanx.store")
    store = kind()
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(torch_engine.create_gloo, options(rank, 2, store)) for rank in (0, 1)]
        engines = [each.result() for each in made]
        list(pool.map(lambda engine: engine.close(), engines))
    told = [
        record.getMessage() for record in caplog.records if "PHALANX_SECRET" in str(record.args)
    ]
    assert len(told) == (kind is OpenStore)


def test_descriptors_are_asked_for_before_gloo_needs_them(monkeypatch):
    limits, asked = (64, 100_000), []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, wanted: asked.append(wanted))
    ports.raise_limit(1000)
    ((soft, hard),) = asked
    assert soft > 1500
    assert hard == 100_000
    limits = (64, 80)  # no more than it may have
    ports.raise_limit(1000)
    assert asked[1] == (80, 80)
    limits = (80, 80)
    ports.raise_limit(1000)
    assert len(asked) == 2


def test_an_answer_holds_for_one_connection_and_one_direction():
    def answer(attempt, group, who, whom, own, other, token=b"t"):
        one = proofs._Proofs(options(who, 3, HashStore()), token, attempt, [None, None], str)
        return one._answer(group, who, whom, own, other)

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
