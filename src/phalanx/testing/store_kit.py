"""A conformance kit: what any store must do, to be run on any implementation of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TypeVar

from phalanx.errors import DistQueueEmptyError, StoreTimeout
from phalanx.stores import Store

T = TypeVar("T")

# How long a store may take to show one user what another one did.
_PATIENCE = 30.0
_SHORT = 0.05


def check_store(make: Callable[[], tuple[Store, Store]]) -> None:
    """Raise AssertionError at the first rule that a store breaks.

    `make` returns two handles onto one store that is empty, and a fresh one at each call.
    """
    for rule in (
        _values,
        _counters,
        _missing_keys,
        _waiting,
        _compare_set,
        _deletion,
        _several_keys,
        _barrier,
        _bad_arguments,
        _timeouts,
        _clones,
        _many_threads,
    ):
        rule(*make())
    if make()[0].has_extended_api():
        _append(*make())
        _queues(*make())
        _waiting_poppers(*make())


@contextmanager
def _raises(kind: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__} was raised")


def _put(store: Store, key: str, value: str | bytes) -> None:
    """Set a key so that every handle sees it: an answer to this one means that it is done."""
    store.set(key, value)
    assert store.check([key])


def _start(call: Callable[[], T]) -> Future[T]:
    """Run `call` in a thread of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(call)
    pool.shutdown(wait=False)
    return future


def _values(one: Store, two: Store) -> None:
    one.set("key", "text")
    assert two.get("key") == b"text"
    _put(two, "key", b"\x00\xff bytes")
    assert one.get("key") == b"\x00\xff bytes"
    for key, value in (("", b"empty key"), ("é/π", "ü".encode()), ("a\0b", b""), ("k" * 300, b"")):
        one.set(key, value)
        assert two.get(key) == value
    large = bytes(range(256)) * 4096
    one.set("large", large)
    assert two.get("large") == large


def _counters(one: Store, two: Store) -> None:
    assert one.add("n", 5) == 5
    assert two.add("n", -7) == -2
    assert one.get("n") == b"-2"
    _put(one, "n", "40")
    assert two.add("n", 2) == 42
    _put(one, "n", "")
    assert two.add("n", 0) == 0
    for text in ("abc", "12abc", str(2**70)):
        _put(one, "text", text)
        with _raises(ValueError):
            two.add("text", 1)
        assert one.get("text") == text.encode()
    one.set("n", str(2**63 - 1))
    with _raises(ValueError):
        one.add("n", 1)


def _missing_keys(one: Store, two: Store) -> None:
    before = one.num_keys()
    assert one.check([])
    assert not two.check(["a"])
    _put(one, "a", "1")
    assert two.check(["a"])
    assert not two.check(["a", "b"])
    two.add("b", 1)
    assert one.check(["a", "b"])
    assert one.num_keys() == before + 2
    assert {"a", "b"} <= set(two.list_keys())


def _waiting(one: Store, two: Store) -> None:
    one.wait([])
    with _raises(StoreTimeout):
        one.wait(["a"], _SHORT)
    with _raises(StoreTimeout):
        one.wait(["a"], timedelta(seconds=_SHORT))
    got = _start(lambda: one.get("a"))
    waited = _start(lambda: one.wait(["a", "b"], _PATIENCE))
    two.set("b", "2")
    two.set("a", "1")
    assert got.result(_PATIENCE) == b"1"
    assert waited.result(_PATIENCE) is None
    one.wait(["a", "b"], 0)


def _compare_set(one: Store, two: Store) -> None:
    assert one.compare_set("c", "old", "new") == b"old"
    assert not two.check(["c"])
    assert one.compare_set("c", "", "new") == b"new"
    assert two.get("c") == b"new"
    assert two.compare_set("c", "old", "newer") == b"new"
    assert two.compare_set("c", b"new", b"newer") == b"newer"
    assert one.get("c") == b"newer"


def _deletion(one: Store, two: Store) -> None:
    before = one.num_keys()
    assert not one.delete_key("d")
    _put(one, "d", "1")
    assert two.delete_key("d")
    assert not one.check(["d"])
    assert one.num_keys() == before


def _several_keys(one: Store, two: Store) -> None:
    one.multi_set([], [])
    assert one.multi_get([]) == []
    one.multi_set(["a", "b"], ["1", b"2"])
    assert two.multi_get(["b", "a", "b"]) == [b"2", b"1", b"2"]
    with _raises(ValueError):
        one.multi_set(["a", "b"], ["1"])
    one.set_timeout(_SHORT)
    with _raises(StoreTimeout):
        one.multi_get(["a", "c"])


def _barrier(one: Store, two: Store) -> None:
    one.barrier("alone", 1)
    for _ in range(3):
        other = _start(lambda: one.barrier("both", 2, _PATIENCE))
        two.barrier("both", 2, timedelta(seconds=_PATIENCE))
        other.result(_PATIENCE)
    with _raises(StoreTimeout):
        one.barrier("both", 2, _SHORT)
    with _raises(ValueError):
        one.barrier("nobody", 0)


def _bad_arguments(one: Store, two: Store) -> None:
    for call in (
        lambda: one.set(1, "a"),  # type: ignore[arg-type]
        lambda: one.set("a", 1),  # type: ignore[arg-type]
        lambda: one.check("ab"),
        lambda: one.add("a", 1.5),  # type: ignore[arg-type]
        lambda: one.wait(["a"], "soon"),  # type: ignore[arg-type]
    ):
        with _raises(TypeError):
            call()
    assert not two.check(["a"])


def _timeouts(one: Store, two: Store) -> None:
    one.set_timeout(timedelta(seconds=7))
    assert one.timeout == timedelta(seconds=7)
    one.set_timeout(_SHORT)
    assert one.timeout == timedelta(seconds=_SHORT)
    with _raises(StoreTimeout):
        one.get("nothing")
    with _raises(TypeError):
        one.set_timeout("soon")  # type: ignore[arg-type]
    two.set("nothing", "something")
    assert one.get("nothing") == b"something"


def _clones(one: Store, two: Store) -> None:
    one.set_timeout(11)
    twin = one.clone()
    assert type(twin) is type(one)
    assert twin.timeout == timedelta(seconds=11)
    twin.set("a", "1")
    assert two.get("a") == b"1"


def _many_threads(one: Store, two: Store) -> None:
    """A thread that waits must not hold up others, on the same handle or another."""
    threads = 8
    start = threading.Barrier(threads)

    def work(index: int) -> bytes:
        store = (one, two)[index % 2]
        start.wait(_PATIENCE)
        for _ in range(10):
            store.add("total", 1)
        store.set(f"from/{index}", str(index))
        return store.get(f"from/{(index + 1) % threads}")

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(work, range(threads)))
    assert found == [b"%d" % ((index + 1) % threads) for index in range(threads)]
    assert one.add("total", 0) == 10 * threads


def _append(one: Store, two: Store) -> None:
    one.append("a", "x")
    two.append("a", b"y")
    assert one.get("a") == b"xy"


def _queues(one: Store, two: Store) -> None:
    before = one.num_keys()
    assert one.queue_len("q") == 0
    with _raises(DistQueueEmptyError):
        one.queue_pop("q", block=False)
    one.queue_push("q", "1")
    two.queue_push("q", b"2")
    assert one.queue_len("q") == 2
    assert two.check(["q"])
    two.wait(["q"], 0)
    assert one.num_keys() == before
    assert "q" not in two.list_keys()
    assert not one.delete_key("q")
    assert two.queue_pop("q") == b"1"
    assert one.queue_pop("q", False) == b"2"
    assert not two.check(["q"])
    one.set_timeout(_SHORT)
    with _raises(StoreTimeout):
        one.queue_pop("q")


def _waiting_poppers(one: Store, two: Store) -> None:
    """Each value reaches exactly one of those waiting."""
    poppers = [_start(partial(store.queue_pop, "q")) for store in (one, two, one)]
    for value in ("1", "2", "3"):
        two.queue_push("q", value)
    assert sorted(popper.result(_PATIENCE) for popper in poppers) == [b"1", b"2", b"3"]
    assert one.queue_len("q") == 0
