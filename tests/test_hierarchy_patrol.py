"""What becomes of those who ask a store that does not answer, or that others died over."""

import base64
import json
import threading

import pytest
import torch
from pretended_hosts import on_hosts

import phalanx as dist
from phalanx import _native
from phalanx.backends.hierarchy import entries
from phalanx.backends.hierarchy.patrol import Patrol


@pytest.fixture
def lost():
    return threading.Event()


@pytest.fixture
def patrol(lost):
    patrol = Patrol(lambda: None, 0.01, lost.is_set)
    patrol.start()
    yield patrol
    patrol.close()


def test_an_errand_is_run_by_the_patrol(patrol):
    assert patrol.do(threading.current_thread).name == "phalanx-warden"
    assert patrol.do(lambda: patrol.do(lambda: 3)) == 3


def test_an_errand_that_goes_wrong_is_told_to_who_sent_for_it(patrol):
    with pytest.raises(ZeroDivisionError):
        patrol.do(lambda: 1 // 0)
    assert patrol.do(lambda: 3) == 3


def test_a_round_that_goes_wrong_is_told_once_and_does_not_end_the_rounds(lost, caplog):
    rounds = threading.Semaphore(0)

    def go_round():
        rounds.release()
        raise ValueError("not a number")

    patrol = Patrol(go_round, 0.001, lost.is_set)
    patrol.start()
    for _ in range(3):
        assert rounds.acquire(timeout=60)
    patrol.close()
    assert caplog.text.count("ValueError: not a number") == 1


def test_an_errand_that_fails_brings_nothing(patrol):
    def fail():
        raise RuntimeError("no store")

    assert patrol.do(fail) is None
    assert patrol.do(lambda: 3) == 3


def test_nobody_waits_for_a_store_that_is_lost(patrol, lost):
    answer = threading.Event()

    def hang():
        lost.set()  # as the heart finds out while a request hangs
        return answer.wait(60)

    assert patrol.do(hang) is None
    assert patrol.do(lambda: 3) is None
    answer.set()


def leave_a_gap():
    dist.barrier()
    if dist.get_rank() == 0:
        dist.group.WORLD.backend._warden._store.add("log", 1)  # and is killed before it writes
    dist.barrier()
    dist.all_reduce(torch.ones(3 + dist.get_rank()))


def test_a_word_that_nobody_finished_keeps_no_other_from_being_read():
    for error in on_hosts(leave_a_gap, "abc", return_exceptions=True):
        assert isinstance(error, dist.CollectiveMismatch)


MALFORMED = [
    b'{"kind": "ended", "rank": 2000000000, "text": "is gone"}',
    b'{"kind": "ended", "rank": -1, "text": "is gone"}',
    b'{"kind": "ended", "rank": 3, "text": "is gone"}',
    b'{"kind": "ended", "rank": 1e400, "text": "is gone"}',
    b'{"kind": "ended", "rank": true, "text": "is gone"}',
    b'{"kind": "ended", "rank": 1, "text": 7}',
    b'{"kind": "ended", "rank": ' + b"9" * 5000 + b', "text": "is gone"}',
    b'{"kind": "ended"}',
    b'{"kind": "broken", "group": [], "number": 1, "error": "PeerFailed", "text": ""}',
    b'{"kind": "broken", "group": "world", "number": -1, "error": "PeerFailed", "text": ""}',
    b'{"kind": "broken", "group": "world", "number": 1, "error": {}, "text": ""}',
    b'{"kind": "deadlock", "waits": [[1, 2, 3]], "text": ""}',
    b'{"kind": "deadlock", "waits": [[7, 2]], "text": ""}',
    b'{"kind": "left", "group": "world", "rank": "1"}',
    b'{"kind": "closed", "rank": null}',
    b'{"kind": "ask", "group": 1}',
    b'{"kind": ["ended"]}',
    b'{"kind": "dance"}',
    b'{"rank": 1}',
    b"[1, 2]",
    b"7",
    b"",
    b"{",
    b"\xff\xfe{}",
    b"[" * 100_000,
]


@pytest.mark.parametrize("data", MALFORMED, ids=lambda data: str(data[:50]))
def test_a_malformed_entry_is_told_from_a_right_one(data):
    with pytest.raises(entries.Malformed):
        entries.log_entry(data, 3)


def test_an_entry_may_name_any_error_and_half_a_character():
    data = (
        rb'{"kind": "broken", "group": "a", "number": 3, "error": "annotations", "text": "x\ud800"}'
    )
    entry = entries.log_entry(data, 3)
    assert entry["error"] is dist.DistBackendError
    assert entry["text"] == "x?"


@pytest.mark.parametrize(
    "data", [b"[1]", b'["1", ""]', b"[1, 2]", b"[-1, '']", b"\xff", b"{}", b'[1, "", 3]']
)
def test_a_malformed_account_of_a_rank_is_refused(data):
    with pytest.raises(entries.Malformed):
        entries.account(data)


@pytest.mark.parametrize("facts", [b"", b"abc", b"\xff" * 2000])
def test_facts_of_a_wait_from_another_host_are_checked(facts):
    with pytest.raises(ValueError, match="not the facts of a wait"):
        _native.deadlock_among(3, [(1, facts)], [])
    told = json.dumps([1, [[1, 5, base64.b64encode(facts).decode()]]])
    with pytest.raises(entries.Malformed, match="not the facts of a wait"):
        entries.waits_of_host(told.encode(), 3)


def spread_nonsense(caplog):
    dist.barrier()
    warden = dist.group.WORLD.backend._warden
    if dist.get_rank() == 0:
        for data in MALFORMED:
            warden._store.set(f"log/{warden._store.add('log', 1)}", data)
        warden._store.set("stuck/b", b"[1, 2, 3]")
    dist.barrier()
    warden.read()
    assert dist.all_reduce(value := torch.tensor([3.0 + dist.get_rank()])) is None
    assert value.item() == 12
    reader = warden._patrol._thread
    dist.barrier()
    warden._write(kind="left", group="another", rank=dist.get_rank())
    dist.barrier()
    warden.read()
    assert reader.is_alive()
    return warden._left["another"]


def test_malformed_entries_are_told_once_and_end_nobody(caplog):
    for left in on_hosts(spread_nonsense, "abc", caplog):
        assert left == {0, 1, 2}
    told = [r.args[0] for r in caplog.records if "is skipped" in r.getMessage()]
    assert sorted(told) == sorted(
        f"log/{n}" for n in range(1, len(MALFORMED) + 1) for _ in range(3)
    )
