"""The store in Redis, with a real server."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
import torch
from hosts import needs_hosts

import phalanx as dist
from phalanx.errors import DistError, DistNetworkError, DistStoreError, StoreTimeout
from phalanx.extras import MissingExtra
from phalanx.stores import PrefixStore, RedisStore
from phalanx.stores.attendance import check_in
from phalanx.stores.rendezvous import rendezvous
from phalanx.testing.hosts import Hosts
from phalanx.testing.store_kit import check_store

redis = pytest.importorskip("redis", reason='needs redis: pip install "phalanx[redis]"')
BINARY = shutil.which("redis-server") or shutil.which("valkey-server")
pytestmark = pytest.mark.skipif(
    BINARY is None, reason="needs the command redis-server or valkey-server"
)
TIMEOUT = 30.0
PASSWORD = "open sesame"


class Redis:
    """A server of its own, on a free port."""

    def __init__(self, directory: Path, *options: str, host: str = "127.0.0.1") -> None:
        command = [BINARY, "--save", "", "--dir", directory, "--bind", host, *options]
        kind = "--tls-port" if "--port" in options else "--port"
        # It takes the port that it is told: try until one is free.
        for port in range(20000 + os.getpid() % 10000, 65535, 7):
            self._process = subprocess.Popen(
                [*map(str, command), kind, str(port)],
                stdout=subprocess.PIPE,
                text=True,
            )
            self.port = port
            if self._is_ready():
                return
            self.close()
        raise AssertionError("no port was free")

    def _is_ready(self) -> bool:
        return any("Ready to accept connections" in line for line in self._process.stdout)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def keys(self) -> list[bytes]:
        return redis.Redis(port=self.port).keys()

    def stop(self, number: int) -> None:
        self._process.send_signal(number)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    found = Redis(tmp_path_factory.mktemp("redis"))
    yield found
    found.close()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Redis]:
    found = Redis(tmp_path)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


names = (f"test{number}" for number in count())


def test_conformance(server):
    def make():
        prefix = next(names)
        return RedisStore(server.url, prefix), RedisStore(server.url, prefix)

    check_store(make)


def test_a_part_of_it_conforms(server):
    def make():
        prefix = next(names)
        return tuple(PrefixStore("p", RedisStore(server.url, prefix)) for _ in range(2))

    check_store(make)


def test_prefixes_keep_stores_apart(server):
    one, other = RedisStore(server.url, next(names)), RedisStore(server.url, next(names))
    one.set("key", "1")
    assert not other.check(["key"])
    assert (one.num_keys(), other.num_keys()) == (1, 0)


def test_numbers_have_all_of_64_bits(server):
    store = RedisStore(server.url, next(names))
    assert store.add("n", 2**63 - 1) == 2**63 - 1
    assert store.add("n", -1) == 2**63 - 2
    with pytest.raises(ValueError, match="64 bits"):
        store.add("n", 2**63)


def test_the_last_user_removes_what_is_in_it(own_server):
    one, other = (RedisStore(own_server.url, "mine", world_size=2) for _ in range(2))
    one.set("key", "1")
    other.queue_push("queue", "1")
    twin = one.clone()
    del one
    gc.collect()
    del other
    gc.collect()
    assert twin.get("key") == b"1"  # a clone is the same user
    del twin
    gc.collect()
    assert own_server.keys() == []


def test_what_nobody_removes_is_forgotten(own_server):
    store = RedisStore(own_server.url, "mine")
    store.set("key", "1")
    store.queue_push("queue", "1")
    found = redis.Redis(port=own_server.port)
    assert len(found.keys()) == 3
    assert all(found.ttl(key) > 24 * 3600 for key in found.scan_iter())


def test_errors_name_the_server_and_not_the_password(own_server):
    redis.Redis(port=own_server.port).config_set("requirepass", PASSWORD)
    with pytest.raises(DistNetworkError, match=f"127.0.0.1:{own_server.port}"):
        RedisStore(own_server.url)
    with pytest.raises(DistNetworkError) as refused:
        RedisStore(own_server.url.replace("//", "//:wrong@"))
    assert "wrong@" not in str(refused.value)
    store = RedisStore(own_server.url.replace("//", "//:open%20sesame@"))
    store.set("key", "1")
    assert store.get("key") == b"1"
    assert PASSWORD not in repr(store)


def test_what_the_server_refuses_is_an_error_of_the_store(own_server):
    store = RedisStore(own_server.url)
    redis.Redis(port=own_server.port).config_set("maxmemory", "1")
    with pytest.raises(DistStoreError, match="maxmemory"):
        store.set("key", "1")


def test_tls(tmp_path):
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", tmp_path / "key", "-out", tmp_path / "certificate"),
        ],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("needs the command openssl")
    files = ["--tls-cert-file", tmp_path / "certificate", "--tls-key-file", tmp_path / "key"]
    options = ["--port", "0", "--tls-auth-clients", "no", *map(str, files)]
    secure = Redis(tmp_path, *options)
    try:
        url = f"rediss://localhost:{secure.port}/0"
        store = RedisStore(f"{url}?ssl_ca_certs={tmp_path / 'certificate'}")
        store.set("key", "1")
        assert store.get("key") == b"1"
        with pytest.raises(DistNetworkError, match="certificate"):
            RedisStore(url)
    finally:
        secure.close()


def test_a_server_that_dies_ends_waits(own_server):
    store = RedisStore(own_server.url, timeout=TIMEOUT)
    calls = [lambda: store.get("never"), lambda: store.queue_pop("never")]
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(call) for call in calls]
        found = redis.Redis(port=own_server.port)
        while not (found.pubsub_channels() and found.info("clients")["blocked_clients"]):
            pass
        own_server.stop(signal.SIGKILL)
        for wait in waits:
            with pytest.raises(DistNetworkError, match="lost the store"):
                wait.result(TIMEOUT)
    with pytest.raises(DistNetworkError, match="could not reach it"):
        RedisStore(own_server.url)


def test_a_server_that_hangs_is_found_out(own_server):
    store = RedisStore(own_server.url, timeout=1.0)
    own_server.stop(signal.SIGSTOP)
    with pytest.raises(DistNetworkError, match="does not answer"):
        store.add("n", 1)


def test_ctrl_c_ends_a_wait(server):
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from phalanx.stores import RedisStore\n"
        f"store = RedisStore({server.url!r}, {next(names)!r})\n"
        "print('waits', flush=True)\n"
        "store.get('never')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.communicate(timeout=TIMEOUT)[1]


def meet(url: str, size: int) -> list[object]:
    """Let as many ranks meet, in threads; return what became of each."""

    def come(rank: int) -> object:
        try:
            store, *who = next(rendezvous(url, rank, size, timeout=TIMEOUT))
            check_in(store, rank, size, TIMEOUT)
            store.add("ranks", 1)
            store.barrier("all", size)
            return [*who, store.add("ranks", 0)]
        except DistError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(come, range(size)))


def test_worlds_one_after_the_other(own_server):
    for _ in range(3):
        assert meet(own_server.url, 3) == [[0, 3, 3], [1, 3, 3], [2, 3, 3]]
    gc.collect()
    assert own_server.keys() == []


def test_jobs_with_names_do_not_meet(server):
    a, b = next(names), next(names)
    half = next(rendezvous(f"{server.url}?job={a}", 0, 2, timeout=TIMEOUT))
    assert meet(f"{server.url}?job={b}", 2) == [[0, 2, 2], [1, 2, 2]]
    del half


def test_two_of_one_rank(server):
    url = f"{server.url}?job={next(names)}"
    first = next(rendezvous(url, 1, 3, timeout=TIMEOUT))
    with pytest.raises(DistError, match=r"two processes claim to be rank 1 .*\?job=NAME"):
        next(rendezvous(url, 1, 3, timeout=TIMEOUT))
    del first
    gc.collect()
    # Who has given up is not counted among those who come next.
    assert meet(url, 3) == [[0, 3, 3], [1, 3, 3], [2, 3, 3]]


def test_a_rank_that_does_not_come_is_named(server):
    url = f"{server.url}?job={next(names)}"
    store, rank, size = next(rendezvous(url, 0, 2, timeout=0.2))
    with pytest.raises(StoreTimeout, match="did not come: 1"):
        check_in(store, rank, size, 0.2)


def test_the_launcher_says_who_a_rank_is(server, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_PORT", next(names))
    store, rank, size = next(rendezvous(server.url))
    assert (rank, size) == (0, 1)
    assert store.prefix.startswith("phalanx:MASTER_PORT=test")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://", "host"),
        ("redis://localhost?rank=0", "WORLD_SIZE"),
        ("redis://localhost?rank=x&world_size=1", "integer"),
    ],
)
def test_a_url_that_says_too_little(url, said):
    with pytest.raises(ValueError, match=said):
        next(rendezvous(url))


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtra, match=r"phalanx\[redis\]"):
        RedisStore("redis://localhost")


PROGRAM = """
import sys, torch, phalanx as dist
for _ in range(2):
    dist.init_process_group(init_method=sys.argv[1])
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [dist.get_world_size()] * 3
    dist.destroy_process_group()
"""


def test_a_job(own_server, program):
    command = [sys.executable, "-m", "phalanx", "run", "-n", "2", program(PROGRAM), own_server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert own_server.keys() == []


PLACE = "redis://host0:6379/0"


def add_up() -> list[float]:
    dist.init_process_group(init_method=PLACE)
    found = []
    for group in (None, dist.new_group([0, 3])):
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        found.append(x.item())
    dist.destroy_process_group()
    return found


def wait_for_the_last() -> str:
    dist.init_process_group(init_method=PLACE)
    dist.barrier()
    if dist.get_rank() == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.PeerFailed) as caught:
        dist.barrier()
    return str(caught.value)


@pytest.fixture
def hosts_with_redis() -> Iterator[Hosts]:
    with Hosts(2, ranks=2) as hosts:
        hosts[0].start([BINARY, "--save", "", "--protected-mode", "no"])
        waiting = ["sh", "-c", "until redis-cli ping; do :; done"]
        hosts[0].run([word.replace("redis", Path(BINARY).name.split("-")[0]) for word in waiting])
        yield hosts


@needs_hosts
def test_a_job_on_several_hosts(hosts_with_redis):
    assert hosts_with_redis.launch(add_up) == [[4.0, 2.0], [4.0, 1.0], [4.0, 1.0], [4.0, 2.0]]


@needs_hosts
def test_a_death_is_told_on_all_hosts(hosts_with_redis):
    found = hosts_with_redis.launch(wait_for_the_last, return_exceptions=True)
    for told in found[:3]:
        assert "rank 3 " in told
        assert "host1" in told
