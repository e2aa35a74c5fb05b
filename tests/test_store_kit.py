"""The kit for stores, on stores that are wrong. On our own it is in test_stores.py."""

from __future__ import annotations

import threading

import pytest
from dict_store import DictStore

from phalanx.errors import StoreTimeout
from phalanx.stores import HashStore
from phalanx.testing import store_kit

# Each with the rule that finds it out.
BROKEN: list[tuple[store_kit.Rule, type[DictStore]]] = []


def breaks(*rules):
    def note(kind):
        BROKEN.extend((rule, kind) for rule in rules)
        return kind

    return note


@breaks(store_kit.values)
class ReturnsText(DictStore):
    def get(self, key):
        return super().get(key).decode(errors="replace")


@breaks(store_kit.values)
class KeepsTheFirst(DictStore):
    def set(self, key, value):
        if key not in self._values:
            super().set(key, value)


@breaks(store_kit.counters)
class ReturnsWhatWasThere(DictStore):
    def add(self, key, amount):
        return super().add(key, amount) - amount


@breaks(store_kit.no_numbers)
class StartsAgain(DictStore):
    def add(self, key, amount):
        try:
            return super().add(key, amount)
        except ValueError:
            self._values[key] = b"0"
            return super().add(key, amount)


@breaks(store_kit.missing_keys)
class ChecksForAny(DictStore):
    def check(self, keys):
        return not keys or any(super(ChecksForAny, self).check([key]) for key in keys)


@breaks(store_kit.waiting, store_kit.deletion, store_kit.several_keys)
class DoesNotWait(DictStore):
    def wait(self, keys, timeout=None):
        pass


@breaks(store_kit.waiting)
class HasAnotherTimeout(DictStore):
    def wait(self, keys, timeout=None):
        try:
            super().wait(keys, timeout)
        except StoreTimeout as error:
            raise TimeoutError("too late") from error


@breaks(store_kit.compare_set)
class MakesWhatIsMissing(DictStore):
    def compare_set(self, key, expected_value, desired_value):
        if key not in self._values:
            self.set(key, expected_value)
        return super().compare_set(key, expected_value, desired_value)


@breaks(store_kit.deletion)
class OnlyEmpties(DictStore):
    def delete_key(self, key):
        return self._values.get(key) is not None and self.set(key, "") is None


@breaks(store_kit.several_keys)
class SortsAnswers(DictStore):
    def multi_get(self, keys):
        return sorted(super().multi_get(keys))


@breaks(store_kit.barrier)
class HasOneBarrier(DictStore):
    def barrier(self, key, world_size, timeout=None):
        if self.add(key, 1) >= world_size:
            self.set(f"{key}/open", "")
        self.wait([f"{key}/open"], timeout)


@breaks(store_kit.bad_arguments)
class TakesEverything(DictStore):
    def set(self, key, value):
        super().set(str(key), value if isinstance(value, bytes) else str(value))


@breaks(store_kit.timeouts)
class ForgetsItsTimeout(DictStore):
    def set_timeout(self, timeout):
        super().set_timeout(1)


@breaks(store_kit.clones)
class SharesItsTimeout(DictStore):
    def clone(self):
        return self


@breaks(store_kit.clones)
class ClonesAnotherKind(DictStore):
    def clone(self):
        return HashStore()


@breaks(store_kit.many_threads)
class LosesUpdates(DictStore):
    def add(self, key, amount):
        before = int(self._values.get(key) or 0)
        threading.Event().wait(0.001)  # lets the others in
        self.set(key, str(before + amount))
        return before + amount


@breaks(store_kit.contention)
class ComparesThenSets(DictStore):
    def compare_set(self, key, expected_value, desired_value):
        if self._values.get(key) != expected_value:
            return self._values[key]
        threading.Event().wait(0.001)
        self.set(key, desired_value)
        return desired_value


@breaks(store_kit.without_extended_api)
class HidesItsQueues(DictStore):
    def queue_len(self, key):
        return 0


class QueueStore(HashStore):
    """A store with queues, for others to break."""


@breaks(store_kit.append)
class Replaces(QueueStore):
    def append(self, key, value):
        self.set(key, value)


@breaks(store_kit.queues)
class CountsQueues(QueueStore):
    def list_keys(self):
        return [*super().list_keys(), "q"]


@breaks(store_kit.order_in_queues)
class IsAStack(QueueStore):
    def queue_pop(self, key, block=True):
        values = [super(IsAStack, self).queue_pop(key) for _ in range(self.queue_len(key))]
        for value in values[:-1]:
            self.queue_push(key, value)
        return values[-1]


@breaks(store_kit.waiting_poppers)
class GivesTwice(QueueStore):
    def queue_pop(self, key, block=True):
        value = super().queue_pop(key, block)
        if value == b"1":
            self.queue_push(key, value)
        return b"2" if value == b"1" else value


def broken_pair(kind):
    store = kind()
    return store, kind(store._shared) if isinstance(store, DictStore) else store


@pytest.mark.parametrize(("rule", "kind"), BROKEN, ids=lambda each: each.__name__)
def test_the_kit_notices(rule, kind):
    with pytest.raises(AssertionError) as caught:
        store_kit.check_rule(rule, lambda: broken_pair(kind))
    assert str(caught.value).startswith(f"{rule.__name__}, {kind.__name__}, broke the rule: ")
    assert rule.__doc__.split("\n")[0] in str(caught.value)


def test_every_rule_can_be_broken():
    rules = {*store_kit.RULES, *store_kit.EXTENDED_RULES, store_kit.without_extended_api}
    assert {rule for rule, _ in BROKEN} == rules


def test_handles_of_two_stores_are_told_in_time():
    with pytest.raises(AssertionError, match=r"^values, HashStore, has not kept .* after 0.2 s"):
        store_kit.check_store(lambda: (HashStore(), HashStore()), timeout=0.2)


def test_a_store_that_hangs_is_told_with_the_rule_and_the_place():
    class Hangs(DictStore):
        def wait(self, keys, timeout=None):
            forever.wait()

    forever = threading.Event()
    try:
        with pytest.raises(AssertionError, match=r"^values, Hangs[\s\S]*forever.wait()") as caught:
            store_kit.check_store(lambda: broken_pair(Hangs), timeout=0.2)
    finally:
        forever.set()
    assert store_kit.values.__doc__ in str(caught.value)
