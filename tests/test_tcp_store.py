"""The TCP store: who may talk to it, and what it does with those who misbehave."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx import _native
from phalanx.errors import DistNetworkError, StoreTimeout
from phalanx.stores import TCPStore

HOST = "127.0.0.1"
MAGIC = 0x7068616C616E7801


@pytest.fixture(autouse=True)
def _no_secret(monkeypatch):
    monkeypatch.delenv("PHALANX_SECRET", raising=False)


def master(**options) -> TCPStore:
    return TCPStore(HOST, 0, is_master=True, wait_for_workers=False, **options)


def client(port: int, timeout: float = 30, **options) -> TCPStore:
    return TCPStore(HOST, port, timeout=timeout, wait_for_workers=False, **options)


@contextlib.contextmanager
def raw(port: int) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, port), timeout=30) as connection:
        yield connection


def frame(contents: bytes) -> bytes:
    return struct.pack("=I", len(contents)) + contents


def read_frame(connection: socket.socket) -> bytes:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = connection.recv(count - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    return exactly(struct.unpack("=I", exactly(4))[0])


def is_closed(connection: socket.socket) -> bool:
    """Whether the server hangs up (the socket's own timeout says how long to wait)."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return True


def introduce(connection: socket.socket, secret: bytes = b"") -> bool:
    """Speak the client's side of the handshake, independently of the native one."""
    mine = os.urandom(32)
    connection.sendall(frame(struct.pack("=Q", MAGIC) + mine))
    magic, _, theirs = struct.unpack("=QB32s", read_frame(connection))
    assert magic == MAGIC
    connection.sendall(frame(_native.hmac_sha256(secret, b"phalanx store client" + mine + theirs)))
    welcome, proof = struct.unpack("=B32s", read_frame(connection))
    if welcome:
        assert proof == _native.hmac_sha256(secret, b"phalanx store server" + mine + theirs)
    return bool(welcome)


def request(op: int, *keys: bytes, values: tuple[bytes, ...] = (), number: int = 0) -> bytes:
    def strings(items: tuple[bytes, ...]) -> bytes:
        return struct.pack("=I", len(items)) + b"".join(frame(item) for item in items)

    return frame(struct.pack("=Bq", op, number) + strings(keys) + strings(values))


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.005)


SET, GET, POP, CANCEL, JOIN = 0, 1, 11, 14, 15

# --- arguments


def test_port_zero_and_properties():
    store = master(timeout=7)
    assert store.host == HOST
    assert store.port > 0
    assert store.timeout.total_seconds() == 7
    assert not store.libuvBackend
    assert str(store.port) in repr(store)


def test_listens_only_on_the_address_asked_for():
    store = TCPStore("127.0.0.2", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, store.port), timeout=5)
    socket.create_connection(("127.0.0.2", store.port), timeout=5).close()


def test_master_waits_for_workers():
    store = master()
    port = store.port
    del store
    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(TCPStore, HOST, port, 3, timeout=30) for _ in range(2)]
        store = TCPStore(HOST, port, 3, True)
        assert store.num_keys() == 1
        for worker in workers:
            assert worker.result().num_keys() == 1


def test_master_says_how_many_came():
    with pytest.raises(StoreTimeout, match="1 of 2 processes"):
        TCPStore(HOST, 0, 2, True, timeout=0.05)


def test_multi_tenant_masters_share_a_server():
    one = master(multi_tenant=True)
    two = TCPStore(HOST, one.port, is_master=True, multi_tenant=True, wait_for_workers=False)
    one.set("a", "1")
    assert two.get("a") == b"1"
    with pytest.raises(DistNetworkError, match="another process has it"):
        TCPStore(HOST, one.port, is_master=True, wait_for_workers=False)


def test_listening_socket_can_be_handed_over():
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    store = master(master_listen_fd=listener.detach())
    assert store.port == port
    store.set("a", "1")
    with socket.socket() as closed, pytest.raises(ValueError, match="not a listening socket"):
        master(master_listen_fd=closed.fileno())


@pytest.mark.parametrize(("port", "is_master"), [(-1, True), (1 << 16, True), (0, False)])
def test_bad_ports(port, is_master):
    with pytest.raises(ValueError, match="port"):
        TCPStore(HOST, port, is_master=is_master, wait_for_workers=False)


# --- errors


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return listener.getsockname()[1]


def test_nobody_listens():
    port = free_port()
    with pytest.raises(DistNetworkError) as caught:
        client(port, timeout=0.1)
    message = str(caught.value)
    assert f"{HOST}:{port}" in message
    assert "Connection refused" in message
    assert "tries" in message
    assert "rank 0" in message


def test_a_client_may_come_before_its_server():
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(client, port)
        store = TCPStore(HOST, port, is_master=True, wait_for_workers=False)
        store.set("a", "1")
        assert early.result().get("a") == b"1"


def test_unknown_host():
    with pytest.raises(DistNetworkError, match="no-such-host"):
        TCPStore("no-such-host.invalid", 1234, timeout=1, wait_for_workers=False)
    with pytest.raises(DistNetworkError, match="not an address of this machine"):
        TCPStore("192.0.2.1", 0, is_master=True)


def test_dead_server():
    code = (
        "import sys; from phalanx.stores import TCPStore;"
        f"s = TCPStore({HOST!r}, 0, is_master=True, wait_for_workers=False);"
        "print(s.port, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        port = int(process.stdout.readline())
        store = client(port)
        store.set("a", "1")
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(store.get, "never")
            assert store.get("a") == b"1"
            process.kill()
            process.wait()
            with pytest.raises(DistNetworkError, match=str(port)):
                waiting.result()
        for _ in range(3):
            with pytest.raises(DistNetworkError, match=str(port)):
                store.set("a", "2")


def test_a_forked_child_does_not_keep_the_server_alive():
    """As data-loading workers do: they outlive a rank that was killed."""
    code = (
        "import os, sys; from phalanx.stores import TCPStore;"
        f"s = TCPStore({HOST!r}, 0, is_master=True, wait_for_workers=False);"
        "child = os.fork();"
        "child and print(s.port, flush=True); sys.stdin.read(); os._exit(0)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        store = client(int(process.stdout.readline()))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.get, "never")
            process.kill()
            with pytest.raises(DistNetworkError):
                waiting.result()
        process.stdin.close()
        assert process.stdout.read() == b""  # the child has ended too


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_use_its_parent_s_store():
    store = master()
    store.set("a", "1")
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if store.get("a") == b"1" and store.add("n", 1) == 1 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.get("n") == b"1"


# --- secrets


def test_one_secret(monkeypatch):
    monkeypatch.setenv("PHALANX_SECRET", "open sesame")
    store = master()
    store.set("a", "1")
    assert client(store.port).get("a") == b"1"
    with raw(store.port) as connection:
        assert introduce(connection, b"open sesame")


@pytest.mark.parametrize(
    ("server", "mine", "message"),
    [
        ("one", "another", "secrets differ"),
        ("one", "", "asks for the job's secret"),
        ("", "one", "has no secret"),
    ],
)
def test_different_secrets(monkeypatch, server, mine, message):
    monkeypatch.setenv("PHALANX_SECRET", server)
    store = master()
    monkeypatch.setenv("PHALANX_SECRET", mine)
    with pytest.raises(DistNetworkError, match=message) as caught:
        client(store.port)
    assert "PHALANX_SECRET" in str(caught.value)
    assert str(store.port) in str(caught.value)


def test_without_the_secret_nothing_is_read_or_written(monkeypatch):
    monkeypatch.setenv("PHALANX_SECRET", "open sesame")
    store = master()
    with raw(store.port) as connection:
        connection.sendall(request(SET, b"a", values=(b"1",)))
        assert is_closed(connection)
    with raw(store.port) as connection:
        assert not introduce(connection, b"guess")
        with contextlib.suppress(OSError):
            connection.sendall(request(SET, b"a", values=(b"1",)))
        assert is_closed(connection)
    with raw(store.port) as connection:
        # A request in place of the proof.
        connection.sendall(frame(struct.pack("=Q", MAGIC) + bytes(32)))
        read_frame(connection)
        connection.sendall(request(SET, b"a", values=(b"1",)))
        assert is_closed(connection)
    with raw(store.port) as one, raw(store.port) as two:
        # The client's proof of one connection does not open another.
        nonce = os.urandom(32)
        for connection in (one, two):
            connection.sendall(frame(struct.pack("=Q", MAGIC) + nonce))
        theirs = read_frame(one)[-32:]
        read_frame(two)
        message = b"phalanx store client" + nonce + theirs
        two.sendall(frame(_native.hmac_sha256(b"open sesame", message)))
        assert read_frame(two)[0] == 0
    assert not store.check(["a"])


def test_a_server_that_cannot_prove_the_secret_is_refused(monkeypatch):
    """It may say that it has one and let everybody in: the client asks for proof."""
    with socket.create_server((HOST, 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                read_frame(connection)
                connection.sendall(frame(struct.pack("=QB32s", MAGIC, 1, os.urandom(32))))
                # Give the client's own proof back, and welcome it.
                connection.sendall(frame(b"\x01" + read_frame(connection)))

        thread = threading.Thread(target=pretend)
        thread.start()
        monkeypatch.setenv("PHALANX_SECRET", "open sesame")
        with pytest.raises(DistNetworkError, match="cannot prove"):
            client(listener.getsockname()[1])
        thread.join()


def test_something_else_listens():
    with socket.create_server((HOST, 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.9 and more than a frame's length\r\n")
                connection.recv(100)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(DistNetworkError, match="not a phalanx store"):
            client(listener.getsockname()[1])
        thread.join()


# --- misbehaviour


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        frame(b""),
        frame(bytes(range(40))),
        frame(b"x" * 65),
        struct.pack("=I", 1 << 31),
    ],
)
def test_garbage_instead_of_a_handshake(garbage):
    store = master()
    with raw(store.port) as connection:
        connection.sendall(garbage)
        assert is_closed(connection)
    store.set("a", "1")


@pytest.mark.parametrize(
    "garbage",
    [
        frame(b""),
        frame(b"\xff" * 30),
        struct.pack("=I", (64 << 20) + 1),
        frame(struct.pack("=BqII", GET, 0, 1 << 30, 0)),  # a list of a billion keys
        frame(struct.pack("=BqIII", GET, 0, 1, 1 << 30, 0)),  # a key of a gigabyte
        request(GET, b"k") + b"".join(request(GET, b"k") for _ in range(3)),  # not one at a time
        request(JOIN),  # not a request of this transport
        request(SET, b"k"),  # a key without a value
    ],
)
def test_garbage_after_the_handshake(garbage):
    store = master()
    with raw(store.port) as connection:
        assert introduce(connection)
        connection.sendall(garbage)
        if garbage == request(JOIN):
            assert read_frame(connection)[0] == 1  # refused, and the connection lives
        else:
            assert is_closed(connection)
    assert not store.check(["k"])


def test_silent_and_slow_clients_are_dropped():
    server = _native.StoreServer(HOST, 0, "", handshake=2, frame=0.1)
    core = _native.StoreClient(HOST, server.port, "", 30.0)
    with raw(server.port) as silent, raw(server.port) as slow:
        assert introduce(slow)
        slow.sendall(request(SET, b"a", values=(b"1",))[:-1])
        assert is_closed(silent)
        assert is_closed(slow)
    assert not core.check(["a"], 30.0)


def test_a_client_that_does_not_take_its_reply_is_dropped():
    server = _native.StoreServer(HOST, 0, "", frame=1)
    core = _native.StoreClient(HOST, server.port, "", 30.0)
    core.set("large", bytes(16 << 20), 30.0)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.settimeout(30)
        deaf.connect((HOST, server.port))
        assert introduce(deaf)
        before = open_descriptors()
        deaf.sendall(request(GET, b"large"))
        wait_until(lambda: open_descriptors() == before - 1)
        with pytest.raises((EOFError, ConnectionResetError)):
            read_frame(deaf)
    core.wait(["large"], 30.0)


def test_limit_on_connections():
    server = _native.StoreServer(HOST, 0, "", connections=2)
    with raw(server.port) as one, raw(server.port) as two:
        assert introduce(one)
        assert introduce(two)
        with pytest.raises(DistNetworkError, match="2 connections, and that is its limit"):
            _native.StoreClient(HOST, server.port, "", 30.0)


def test_oversize_requests_are_refused_before_they_are_sent():
    store = master()
    with pytest.raises(ValueError, match="more than the"):
        store.set("large", bytes(65 << 20))
    store.set("half", bytes(40 << 20))
    with pytest.raises(ValueError, match="fewer keys"):
        store.multi_get(["half", "half"])
    assert len(store.get("half")) == 40 << 20


# The most memory that the process has had, of its server's thread too, in MB.
GREEDY = """
import resource, sys
from phalanx.stores import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.set("part", bytes(20 << 20))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    store.multi_get(["part"] * 100)
except ValueError as error:
    assert f"reply of {100 * ((20 << 20) + 4)} bytes" in str(error), error
else:
    sys.exit("was not refused")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def test_a_reply_is_measured_before_it_is_built():
    """100 x 20 MB, which keep a store busy for longer than ranks wait to hear of each other."""
    done = subprocess.run([sys.executable, "-c", GREEDY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 64


def test_values_and_lists_of_keys_grow_only_as_far_as_a_reply():
    store = master()
    store.append("log", bytes(40 << 20))
    with pytest.raises(ValueError, match="append to another key"):
        store.append("log", bytes(40 << 20))
    assert len(store.get("log")) == 40 << 20
    assert len(store.compare_set("log", "other", "new")) == 40 << 20
    names = [letter * (30 << 20) for letter in "abc"]
    for name in names:
        store.set(name, "")
    with pytest.raises(ValueError, match="list_keys"):
        store.list_keys()
    store.delete_key(names[0])
    assert len(store.list_keys()) == 3


def test_a_cancel_that_crosses_the_reply_is_harmless():
    store = master()
    store.set("a", "1")
    with raw(store.port) as connection:
        assert introduce(connection)
        connection.sendall(request(GET, b"a") + request(CANCEL))
        assert read_frame(connection)[0] == 0
        connection.sendall(request(GET, b"b"))
        connection.sendall(request(CANCEL))
        assert read_frame(connection)[0] == 3
        connection.sendall(request(GET, b"a"))
        assert read_frame(connection)[0] == 0


def test_what_is_asked_comes_after_what_was_set():
    """Although a set is not answered, and threads have connections of their own."""
    store = master()
    other = client(store.port)
    with ThreadPoolExecutor(4) as pool:
        for index in range(200):
            other.set("n", str(index))
            assert list(pool.map(lambda _: int(other.get("n")), range(4))) == [index] * 4
            assert other.add("n", 1) == index + 1


def test_a_set_is_not_lost_when_its_process_ends():
    store = master()
    code = (
        "import os; from phalanx.stores import TCPStore;"
        f"store = TCPStore({HOST!r}, {store.port}, wait_for_workers=False);"
        "store.set('last', 'words'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert store.get("last") == b"words"


def test_a_waiting_client_that_dies_is_forgotten():
    store = master()
    with raw(store.port) as connection:
        assert introduce(connection)
        connection.sendall(request(POP, b"q", number=1))
    # Popped by nobody: the one who waited first is gone.
    other = client(store.port)
    store.queue_push("q", "1")
    assert other.queue_pop("q", block=False) == b"1"


def test_256_clients():
    server = _native.StoreServer(HOST, 0, "secret")
    clients = [_native.StoreClient(HOST, server.port, "secret", 60.0) for _ in range(256)]
    with ThreadPoolExecutor(256) as pool:

        def meet(index: int) -> bytes:
            core = clients[index]
            if core.add("arrived", 1, 60.0) == 256:
                core.set("all", b"here", 60.0)
            return core.get("all", 60.0)

        assert set(pool.map(meet, range(256))) == {b"here"}


def test_nothing_is_left_behind():
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    gc.collect()
    before = open_descriptors(), threads()
    for _ in range(20):
        store = master()
        store.set("a", "1")
        client(store.port).clone().get("a")
        del store
    gc.collect()
    # Fewer, where something of an earlier test has ended meanwhile.
    wait_until(lambda: open_descriptors() <= before[0] and threads() <= before[1])


# A server whose process may have no more descriptors than it is told: soft, hard.
LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[1:])))
from phalanx import _native
server = _native.StoreServer("127.0.0.1", 0, "", courtesy=0.05)
print(server.port, flush=True)
sys.stdin.read()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@contextlib.contextmanager
def limited_server(soft: int, hard: int) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen(
        [sys.executable, "-c", LIMITED, str(soft), str(hard)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


def test_a_server_takes_the_descriptors_that_it_may_have():
    with limited_server(64, 300) as (process, port):
        clients = [_native.StoreClient(HOST, port, "", 30.0) for _ in range(200)]
        assert clients[-1].add("n", 1, 30.0) == 1
        assert int(process.communicate("")[0]) > 200


def test_a_server_without_descriptors_says_so_and_serves_those_it_has():
    with limited_server(64, 64) as (_, port):
        clients = []
        with pytest.raises(DistNetworkError, match=r"no descriptors left.*ulimit -Hn"):
            clients.extend(_native.StoreClient(HOST, port, "", 30.0) for _ in range(64))
        assert len(clients) > 30
        assert [core.add("n", 1, 30.0) for core in clients] == [*range(1, len(clients) + 1)]
        del clients[0]
        # One has gone, and its place is free.
        late = _native.StoreClient(HOST, port, "", 30.0)
        assert late.check(["n"], 30.0)


def test_strangers_take_few_descriptors_and_keep_nobody_out():
    """300 who connect and say nothing, or only hello, at a process that may have 64 descriptors."""
    with limited_server(64, 64) as (_, port), contextlib.ExitStack() as strangers:
        early = _native.StoreClient(HOST, port, "", 30.0)
        for index in range(300):
            stranger = strangers.enter_context(socket.create_connection((HOST, port), timeout=30))
            if index % 2:
                stranger.sendall(frame(struct.pack("=Q", MAGIC) + bytes(32)))
        assert early.add("n", 2, 30.0) == 2
        late = [_native.StoreClient(HOST, port, "", 30.0) for _ in range(20)]
        assert [core.add("n", 3, 30.0) for core in late] == [*range(5, 65, 3)]


def test_the_oldest_stranger_makes_room():
    server = _native.StoreServer(HOST, 0, "", strangers=2, courtesy=0.05, handshake=600)
    with raw(server.port) as one, raw(server.port) as two, raw(server.port) as three:
        assert is_closed(one)
        assert introduce(two)
        assert introduce(three)
        for known in (two, three):  # these are strangers no more
            known.sendall(request(GET, b"k"))
        with raw(server.port), raw(server.port), raw(server.port):
            core = _native.StoreClient(HOST, server.port, "", 30.0)
            core.set("k", "5", 30.0)
            assert read_frame(two)[-1:] == read_frame(three)[-1:] == b"5"


# A process that needs descriptors itself, while clients take all that they get.
NEEDY = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from phalanx import _native
server = _native.StoreServer("127.0.0.1", 0, "")
print(server.port, flush=True)
sys.stdin.readline()
print(len([os.open("/dev/null", os.O_RDONLY) for _ in range(6)]), flush=True)
sys.stdin.readline()
"""


def test_a_server_leaves_descriptors_to_its_process():
    with subprocess.Popen(
        [sys.executable, "-c", NEEDY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdin
        port = int(process.stdout.readline())
        clients = []
        with pytest.raises(DistNetworkError, match="no descriptors left"):
            clients.extend(_native.StoreClient(HOST, port, "", 30.0) for _ in range(64))
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "6\n"
        process.stdin.close()


# Clients of its own number, each with a connection, that wait for a key at the same time.
CROWD = """
import resource, sys, threading
port, number, total = map(int, sys.argv[1:])
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
threading.stack_size(256 << 10)
from phalanx import _native
clients = [_native.StoreClient("127.0.0.1", port, "", 60.0) for _ in range(number)]
threads = [threading.Thread(target=core.barrier, args=("all", total, 60.0)) for core in clients]
for thread in threads: thread.start()
for thread in threads: thread.join()
clients[0].add("through", number, 60.0)
"""


def test_thousands_of_clients():
    """Which all wait at once, and go on at once."""
    processes, each = 4, 520
    need = processes * each + 64
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < need:
        pytest.skip(f"needs {need} descriptors in a process ('ulimit -Hn')")
    store = master()
    command = [sys.executable, "-c", CROWD, str(store.port), str(each), str(processes * each)]
    crowds = [subprocess.Popen(command) for _ in range(processes)]
    try:
        assert [crowd.wait(100) for crowd in crowds] == [0] * processes
    finally:
        for crowd in crowds:
            crowd.kill()
            crowd.wait()
    assert store.add("through", 0) == processes * each
    assert store.get("all/arrived") == b"%d" % (processes * each)
