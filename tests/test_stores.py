"""The stores, each held against the conformance kit, and against torch's own as the oracle."""

from __future__ import annotations

import gc
import hashlib
import hmac
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed
from dict_store import DictStore
from hypothesis import given
from hypothesis import strategies as st

from phalanx import _native
from phalanx.errors import DistQueueEmptyError, DistStoreError, StoreTimeout
from phalanx.stores import FileStore, HashStore, PrefixStore, Store, TCPStore
from phalanx.testing import store_kit
from phalanx.testing.store_kit import check_store
from phalanx.torch_backend.store import TorchStore

Pair = tuple[Store, Store]


def hash_pair() -> Pair:
    store = HashStore()
    return store, store.clone()


def tcp_pair() -> Pair:
    master = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return master, TCPStore("127.0.0.1", master.port, wait_for_workers=False)


def dict_pair() -> Pair:
    store = DictStore()
    return store, store.clone()


@pytest.fixture
def file_pair(tmp_path: Path) -> Callable[[], Pair]:
    count = iter(range(1000))

    def make() -> Pair:
        path = tmp_path / f"store{next(count)}"
        return FileStore(path, 2), FileStore(str(path), 2)

    return make


def torch_tcp_pair():
    master = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = torch.distributed.TCPStore("127.0.0.1", master.port, wait_for_workers=False)
    return TorchStore(master), TorchStore(other)


def torch_prefix_pair():
    store = torch.distributed.PrefixStore("p", torch.distributed.HashStore())
    return TorchStore(store), TorchStore(store.clone())


def torch_hash_pair():
    store = TorchStore(torch.distributed.HashStore())
    return store, store.clone()


@pytest.fixture(params=["hash", "tcp", "file", "prefix", "nested", "foreign"])
def make(request, file_pair) -> Callable[[], Pair]:
    makers: dict[str, Callable[[], Pair]] = {
        "hash": hash_pair,
        "tcp": tcp_pair,
        "file": file_pair,
        "prefix": lambda: tuple(PrefixStore("p", store) for store in tcp_pair()),
        "nested": lambda: tuple(PrefixStore("q", PrefixStore("p", store)) for store in hash_pair()),
        "foreign": dict_pair,
    }
    return makers[request.param]


def test_conformance(make):
    check_store(make)


TORCH_S = {"hash": torch_hash_pair, "tcp": torch_tcp_pair, "prefix": torch_prefix_pair}


@pytest.mark.parametrize("kind", TORCH_S)
def test_stores_of_torch_s_conform_as_far_as_torch_does(kind):
    for rule in [*store_kit.RULES, store_kit.without_extended_api]:
        if rule is not store_kit.no_numbers:  # torch reads "12abc" as 12, or drops the connection
            store_kit.check_rule(rule, TORCH_S[kind])


# One operation each: what is called, and with what.
SCRIPT = [
    ("set", "a", "1"), ("get", "a"), ("set", "b", b"\x00\xff"), ("get", "b"),
    ("add", "n", 5), ("get", "n"), ("add", "n", -7), ("get", "n"), ("add", "a", 2), ("get", "a"),
    ("append", "p", "x"), ("append", "p", "y"), ("get", "p"),
    ("check", []), ("check", ["a", "zz"]), ("check", ["a", "b"]),
    ("wait", []), ("wait", ["a"]), ("wait", ["a", "zz"], timedelta(milliseconds=20)),
    ("wait", ["zz"], timedelta(milliseconds=20)), ("get", "zz"),
    ("compare_set", "c", "", "v"), ("check", ["c"]),
    ("compare_set", "c2", "e", "v"), ("check", ["c2"]),
    ("compare_set", "a", "3", "v9"), ("get", "a"), ("compare_set", "a", "3", "v10"), ("get", "a"),
    ("num_keys",), ("list_keys",),
    ("delete_key", "b"), ("delete_key", "b"), ("check", ["b"]), ("num_keys",),
    ("multi_set", ["m1", "m2"], ["1", "2"]), ("multi_get", ["m2", "m1"]), ("multi_get", []),
    ("multi_set", [], []), ("multi_get", ["m1", "m9"]),
    ("queue_len", "q"), ("queue_push", "q", "1"), ("queue_push", "q", "2"), ("queue_len", "q"),
    ("check", ["q"]), ("wait", ["q"]), ("num_keys",), ("list_keys",), ("delete_key", "q"),
    ("queue_pop", "q"), ("queue_pop", "q", False), ("check", ["q"]),
    ("queue_pop", "q", False), ("queue_pop", "q"),
    ("queue_push", "a", "1"), ("queue_len", "a"), ("get", "a"), ("queue_pop", "a"), ("get", "a"),
    ("barrier", "b1", 1), ("barrier", "b2", 2, timedelta(milliseconds=20)),
    ("set", "", "z"), ("get", ""), ("set", "é", "ü"), ("get", "é"),
    ("set", "a", 3), ("check", "a"), ("add", "a", 1.5), ("has_extended_api",),
]  # fmt: skip

# torch's exceptions and the ones that stand for them here.
SAME_ERROR = {
    "DistStoreError": DistStoreError,
    "RuntimeError": RuntimeError,
    "QueueEmptyError": DistQueueEmptyError,
    "TypeError": TypeError,
    "ValueError": ValueError,
}


def play(store, script) -> list[object]:
    store.set_timeout(timedelta(milliseconds=30))
    outcomes: list[object] = []
    for name, *arguments in script:
        try:
            result = getattr(store, name)(*arguments)
        except Exception as error:
            result = error
        # Which keys a barrier uses is its own business.
        if name == "list_keys":
            result = sorted(result)
        outcomes.append(result)
    return outcomes


def without(script, *names: str):
    return [step for step in script if step[0] not in names]


@pytest.mark.parametrize("kind", ["hash", "tcp", "file", "prefix"])
def test_same_as_torch(kind, tmp_path):
    script = SCRIPT
    if kind == "hash":
        ours, theirs = HashStore(), torch.distributed.HashStore()
    elif kind == "tcp":
        ours = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        theirs = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    elif kind == "prefix":
        ours = PrefixStore("p", HashStore())
        theirs = torch.distributed.PrefixStore("p", torch.distributed.HashStore())
    else:
        # There torch has no queues, counts a key of its own and "deletes" keys that were not there.
        script = without(
            script, "queue_len", "queue_push", "queue_pop", "num_keys", "list_keys",
            "has_extended_api", "delete_key",
        )  # fmt: skip
        # It also takes a second over every timeout, so one is enough.
        waits = [("wait", ["q"]), ("get", "zz"), ("multi_get", ["m1", "m9"])]
        script = [
            step for step in script if step not in waits and not isinstance(step[-1], timedelta)
        ]
        script.append(("wait", ["zz"], timedelta(milliseconds=20)))
        ours = FileStore(tmp_path / "ours", 1)
        theirs = torch.distributed.FileStore(str(tmp_path / "theirs"), 1)
    for step, mine, expected in zip(script, play(ours, script), play(theirs, script), strict=True):
        if isinstance(expected, Exception):
            assert isinstance(mine, SAME_ERROR[type(expected).__name__]), (step, mine, expected)
        else:
            assert mine == expected, step


def test_interface_is_torch_s():
    for ours, theirs in (
        (Store, torch.distributed.Store),
        (TCPStore, torch.distributed.TCPStore),
        (FileStore, torch.distributed.FileStore),
        (PrefixStore, torch.distributed.PrefixStore),
    ):
        names = {name for name in dir(theirs) if not name.startswith("_")}
        assert names <= set(dir(ours))


def test_a_store_without_extended_api_says_so():
    store = DictStore()
    assert not store.has_extended_api()
    for call in (
        lambda: store.append("a", "b"),
        lambda: store.queue_push("a", "b"),
        lambda: store.queue_pop("a"),
        lambda: store.queue_len("a"),
    ):
        with pytest.raises(NotImplementedError, match="DictStore"):
            call()


def test_timeout_message_names_the_missing_keys():
    store = HashStore()
    store.set("there", "")
    with pytest.raises(StoreTimeout) as caught:
        store.wait(["there", "missing", "gone"], 0.01)
    message = str(caught.value)
    assert "'missing', 'gone'" in message
    assert "'there'" not in message
    assert "0.01 s" in message
    assert isinstance(caught.value, TimeoutError)


def test_prefixes_nest_and_separate():
    base = HashStore()
    outer, other = PrefixStore("outer", base), PrefixStore("other", base)
    inner = PrefixStore("inner", outer)
    inner.set("key", "1")
    other.set("key", "2")
    assert sorted(base.list_keys()) == ["other/key", "outer/inner/key"]
    assert outer.list_keys() == ["inner/key"]
    assert inner.list_keys() == ["key"]
    assert inner.num_keys() == 2
    assert inner.underlying_store is outer
    assert inner._underlying_non_prefix_store is base
    inner.set_timeout(3)
    assert base.timeout == timedelta(seconds=3)
    with pytest.raises(TypeError, match="Store"):
        PrefixStore("p", {})


# --- files


FILE_USER = """
import sys
from phalanx.stores import FileStore
path, index = sys.argv[1:]
store = FileStore(path, 3)
for _ in range(20):
    store.add("total", 1)
store.queue_push("who", index)
store.barrier("done", 3)
"""


def test_file_store_across_processes(tmp_path):
    path = str(tmp_path / "store")
    users = [
        subprocess.Popen([sys.executable, "-c", FILE_USER, path, str(index)]) for index in range(2)
    ]
    store = FileStore(path, 3)
    store.barrier("done", 3)
    assert [user.wait() for user in users] == [0, 0]
    assert store.add("total", 0) == 40
    assert {store.queue_pop("who") for _ in range(2)} == {b"0", b"1"}
    del store
    gc.collect()
    assert not os.path.exists(path)


def test_file_is_removed_by_the_last_user(tmp_path):
    path = tmp_path / "store"
    one = FileStore(path, 2)
    one.set("a", "1")
    assert one.path == str(path)
    del one
    assert path.exists()
    two = FileStore(path, 2)
    assert two.get("a") == b"1"
    del two
    assert not path.exists()
    keeper = FileStore(path)
    del keeper
    assert path.exists()


def test_file_survives_a_torn_record(tmp_path):
    path = tmp_path / "store"
    one = FileStore(path, 2)
    one.set("a", "1")
    with open(path, "ab") as file:
        file.write(b"\x40\x00\x00\x00\x00half of a record")
    one.set("b", "2")
    assert FileStore(path, 2).multi_get(["a", "b"]) == [b"1", b"2"]


def test_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(b"\x0d\x00\x00\x00" + b"\xff" * 64)
    with pytest.raises(DistStoreError, match="notes"):
        FileStore(path)
    with pytest.raises(DistStoreError, match="No such file"):
        FileStore(tmp_path / "missing" / "store")


# --- waiting


@pytest.mark.parametrize("kind", ["hash", "tcp", "file"])
def test_ctrl_c_ends_a_wait(kind, tmp_path, request):
    store = {
        "hash": HashStore,
        "tcp": lambda: TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        "file": lambda: FileStore(tmp_path / "store", 1),
    }[kind]()
    sender = threading.Timer(0.05, lambda: signal.raise_signal(signal.SIGINT))

    def wait():
        sender.start()
        store.get("never")

    # Should the signal come before the wait, it ends there: either way this raises.
    with pytest.raises(KeyboardInterrupt):
        wait()
    sender.join()
    store.set("never", "alive")
    assert store.get("never") == b"alive"


@pytest.mark.parametrize("kind", ["hash", "tcp"])
def test_waits_release_the_gil_and_each_other(kind):
    one, two = hash_pair() if kind == "hash" else tcp_pair()
    with ThreadPoolExecutor(32) as pool:
        waits = [pool.submit(one.get, f"key/{index}") for index in range(31)]
        two.multi_set([f"key/{index}" for index in range(31)], [str(i) for i in range(31)])
        assert [wait.result() for wait in waits] == [b"%d" % index for index in range(31)]


# --- the hash


@given(st.binary(max_size=300), st.binary(max_size=200))
def test_hashes_are_hashlib_s(message, key):
    assert _native.sha256(message) == hashlib.sha256(message).digest()
    assert _native.hmac_sha256(key, message) == hmac.digest(key, message, "sha256")
