"""A conformance kit: what any store must do, to be run on any implementation of one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TypeVar

from phalanx.errors import DistQueueEmptyError, StoreTimeout
from phalanx.stores import Store
from phalanx.testing.rules import broken, law, stack_of

T = TypeVar("T")
Rule = Callable[[Store, Store], None]

# How long a store may take to show one user what another one did.
_PATIENCE = 30.0
_SHORT = 0.05


def check_store(make: Callable[[], tuple[Store, Store]], *, timeout: float = 60) -> None:
    """Raise AssertionError at the first rule that a store breaks, and name it.

    `make` returns two handles onto one store that is empty, and a fresh one at each call. A store
    that has not kept a rule after `timeout` seconds is taken to hang.
    """
    for rule in RULES:
        check_rule(rule, make, timeout)
    extended = EXTENDED_RULES if make()[0].has_extended_api() else [without_extended_api]
    for rule in extended:
        check_rule(rule, make, timeout)


def check_rule(rule: Rule, make: Callable[[], tuple[Store, Store]], timeout: float = 60) -> None:
    """Raise AssertionError if a store breaks one rule, or does not keep it in time."""
    one, two = make()
    checking = _Started(partial(rule, one, two))
    wait([checking], timeout)
    if not checking.done():
        raise AssertionError(
            f"{rule.__name__}, {type(one).__name__}, has not kept the rule after {timeout:g} s: "
            f"{law(rule)}; it stands at\n{stack_of(checking.thread)}"
        )
    if (error := checking.exception()) is not None:
        raise broken(rule, error, type(one).__name__) from error


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


class _Started(Future[T]):
    """What a call returns that runs in a thread of its own."""

    def __init__(self, call: Callable[[], T]) -> None:
        super().__init__()
        # A daemon: a store that hangs must not keep the interpreter alive.
        self.thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self.thread.start()

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self.set_result(call())
        except BaseException as error:
            self.set_exception(error)


def _at_once(call: Callable[[int], T], times: int) -> list[T]:
    """Call with 0, 1, ... in a thread each; return the results."""
    calls = [_Started(partial(call, index)) for index in range(times)]
    return [each.result(_PATIENCE) for each in calls]


def values(one: Store, two: Store) -> None:
    """A value comes back as the bytes that were set last, whatever key and value are."""
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


def counters(one: Store, two: Store) -> None:
    """Counters are decimal numbers; a missing one is 0, and add returns the sum."""
    assert one.add("n", 5) == 5
    assert two.add("n", -7) == -2
    assert one.get("n") == b"-2"
    _put(one, "n", "40")
    assert two.add("n", 2) == 42


def no_numbers(one: Store, two: Store) -> None:
    """Adding to what is no number of 64 bits is a ValueError and changes nothing; empty is 0."""
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


def missing_keys(one: Store, two: Store) -> None:
    """check tells whether all keys exist; num_keys and list_keys know every key."""
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


def waiting(one: Store, two: Store) -> None:
    """get and wait return when their keys are there, and raise StoreTimeout if in vain."""
    one.wait([])
    with _raises(StoreTimeout):
        one.wait(["a"], _SHORT)
    with _raises(StoreTimeout):
        one.wait(["a"], timedelta(seconds=_SHORT))
    got = _Started(lambda: one.get("a"))
    waited = _Started(lambda: one.wait(["a", "b"], _PATIENCE))
    two.set("b", "2")
    two.set("a", "1")
    assert got.result(_PATIENCE) == b"1"
    assert waited.result(_PATIENCE) is None
    one.wait(["a", "b"], 0)


def compare_set(one: Store, two: Store) -> None:
    """compare_set sets a key only if it holds what was expected, and tells what it holds."""
    before = one.num_keys()
    assert one.compare_set("c", "old", "new") == b"old"
    assert not two.check(["c"])
    assert one.num_keys() == before
    assert one.compare_set("c", "", "new") == b"new"
    assert two.get("c") == b"new"
    assert two.compare_set("c", "old", "newer") == b"new"
    assert two.compare_set("c", b"new", b"newer") == b"newer"
    assert one.get("c") == b"newer"


def deletion(one: Store, two: Store) -> None:
    """A key that was deleted is as if it had never been, and delete_key tells if it was."""
    before = one.num_keys()
    assert not one.delete_key("d")
    _put(one, "d", "1")
    assert two.delete_key("d")
    assert not one.check(["d"])
    assert one.num_keys() == before
    assert "d" not in two.list_keys()
    with _raises(StoreTimeout):
        one.wait(["d"], _SHORT)
    assert one.add("d", 3) == 3
    assert two.delete_key("d")
    waiting = _Started(lambda: one.get("d"))
    _put(two, "d", "again")
    assert waiting.result(_PATIENCE) == b"again"


def several_keys(one: Store, two: Store) -> None:
    """multi_set and multi_get do for each key what set and get do."""
    one.multi_set([], [])
    assert one.multi_get([]) == []
    one.multi_set(["a", "b"], ["1", b"2"])
    assert two.multi_get(["b", "a", "b"]) == [b"2", b"1", b"2"]
    with _raises(ValueError):
        one.multi_set(["a", "b"], ["1"])
    waiting = _Started(lambda: one.multi_get(["a", "late"]))
    two.multi_set(["late"], ["3"])
    assert waiting.result(_PATIENCE) == [b"1", b"3"]
    one.set_timeout(_SHORT)
    with _raises(StoreTimeout):
        one.multi_get(["a", "c"])


def barrier(one: Store, two: Store) -> None:
    """A barrier lets as many pass as it was told, again and again."""
    one.barrier("alone", 1)
    for _ in range(3):
        other = _Started(lambda: one.barrier("both", 2, _PATIENCE))
        two.barrier("both", 2, timedelta(seconds=_PATIENCE))
        other.result(_PATIENCE)
    with _raises(StoreTimeout):
        one.barrier("both", 2, _SHORT)
    with _raises(ValueError):
        one.barrier("nobody", 0)


def bad_arguments(one: Store, two: Store) -> None:
    """Arguments of a wrong type are TypeErrors, and nothing happens."""
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


def timeouts(one: Store, two: Store) -> None:
    """The timeout of a handle is what it was set to, and bounds its waits."""
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


def clones(one: Store, two: Store) -> None:
    """A clone is another handle onto the same store, with a timeout of its own."""
    one.set_timeout(11)
    twin = one.clone()
    assert type(twin) is type(one)
    assert twin.timeout == timedelta(seconds=11)
    twin.set("a", "1")
    assert two.get("a") == b"1"
    twin.set_timeout(12)
    assert one.timeout == timedelta(seconds=11)


def many_threads(one: Store, two: Store) -> None:
    """A thread that waits does not hold up others, on the same handle or another."""
    threads = 8
    start = threading.Barrier(threads)

    def work(index: int) -> bytes:
        store = (one, two)[index % 2]
        start.wait(_PATIENCE)
        for _ in range(10):
            store.add("total", 1)
        store.set(f"from/{index}", str(index))
        return store.get(f"from/{(index + 1) % threads}")

    found = _at_once(work, threads)
    assert found == [b"%d" % ((index + 1) % threads) for index in range(threads)]
    assert one.add("total", 0) == 10 * threads


def contention(one: Store, two: Store) -> None:
    """Of several who compare and set at once, each change is made by one, and none is lost."""
    threads, rounds = 4, 5

    def increment(index: int) -> None:
        store = (one, two)[index % 2]
        for _ in range(rounds):
            while True:
                before = store.get("shared")
                # The number alone would not tell who was first.
                after = b"%d by %d" % (int(before.split()[0]) + 1, index)
                if store.compare_set("shared", before, after) == after:
                    break

    _put(one, "shared", "0")
    _at_once(increment, threads)
    assert two.get("shared").split()[0] == b"%d" % (threads * rounds)


def without_extended_api(one: Store, two: Store) -> None:
    """What a store does not have says so, in its has_extended_api and when it is called."""
    for call in (
        lambda: one.append("a", "b"),
        lambda: one.queue_push("a", "b"),
        lambda: one.queue_pop("a"),
        lambda: one.queue_len("a"),
    ):
        with _raises(NotImplementedError):
            call()


def append(one: Store, two: Store) -> None:
    """append adds to the end of a value, or makes it."""
    one.append("a", "x")
    two.append("a", b"y")
    assert one.get("a") == b"xy"


def queues(one: Store, two: Store) -> None:
    """Queues keep their order, live beside the keys, and are gone when they are empty."""
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


def waiting_poppers(one: Store, two: Store) -> None:
    """Each value of a queue reaches exactly one of those waiting."""
    poppers = [_Started(partial(store.queue_pop, "q")) for store in (one, two, one)]
    for value in ("1", "2", "3"):
        two.queue_push("q", value)
    assert sorted(popper.result(_PATIENCE) for popper in poppers) == [b"1", b"2", b"3"]
    assert one.queue_len("q") == 0


def order_in_queues(one: Store, two: Store) -> None:
    """What one has pushed comes out in that order, also between what others push."""

    def push(index: int) -> None:
        for i in range(10):
            (one, two)[index % 2].queue_push("q", f"{index} {i}")

    _at_once(push, 3)
    assert one.queue_len("q") == 30
    popped = [one.queue_pop("q").decode().split() for _ in range(30)]
    for index in "012":
        assert [number for who, number in popped if who == index] == [str(i) for i in range(10)]


RULES: list[Rule] = [
    values,
    counters,
    no_numbers,
    missing_keys,
    waiting,
    compare_set,
    deletion,
    several_keys,
    barrier,
    bad_arguments,
    timeouts,
    clones,
    many_threads,
    contention,
]
EXTENDED_RULES: list[Rule] = [append, queues, order_in_queues, waiting_poppers]
