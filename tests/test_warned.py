"""Warnings of thread ranks: each catches its own."""

# ruff: noqa: PT030, PT031 (what ranks do together within such blocks is what is tested)

from __future__ import annotations

import threading
import warnings

import pytest

import phalanx as dist
from phalanx.launch.threads import run_threads


def test_each_rank_records_its_own_whatever_the_order() -> None:
    def fn() -> list[str]:
        rank = dist.get_rank()
        with pytest.warns(UserWarning, match="from") as caught:
            dist.barrier()
            warnings.warn(f"from {rank}", stacklevel=1)
            for _ in range(1 + (rank + 2) % 4):  # they leave in another order than by rank
                dist.barrier()
        for _ in range(4 - (rank + 2) % 4):
            dist.barrier()
        return [str(each.message) for each in caught]

    assert run_threads(fn, 4) == [[f"from {rank}"] for rank in range(4)]


def test_what_no_rank_records_reaches_who_does_outside() -> None:
    def fn() -> None:
        if dist.get_rank() == 0:
            with warnings.catch_warnings(record=True) as inner:
                warnings.simplefilter("always")
                dist.barrier()
                dist.barrier()
            assert inner == []
        else:
            dist.barrier()
            warnings.warn("outside", stacklevel=1)
            dist.barrier()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_threads(fn, 2)
    assert [str(each.message) for each in caught] == ["outside"]


def test_threads_of_a_rank_warn_for_it_and_blocks_nest() -> None:
    def fn() -> tuple[list[str], list[str]]:
        with pytest.warns(UserWarning) as outer:
            with pytest.warns(UserWarning) as inner:
                child = threading.Thread(target=warnings.warn, args=("in a child",))
                child.start()
                child.join()
            warnings.warn("after it", stacklevel=1)
        return [str(each.message) for each in inner], [str(each.message) for each in outer]

    assert run_threads(fn, 3) == [(["in a child"], ["after it"])] * 3


def test_errors_for_warnings_hold_in_ranks() -> None:
    def fn() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dist.barrier()
            with pytest.raises(UserWarning, match="wrong"):
                warnings.warn("wrong", stacklevel=1)
            dist.barrier()

    run_threads(fn, 3)


def test_all_is_as_before_in_the_end() -> None:
    def state() -> tuple[object, ...]:
        catch = warnings.catch_warnings
        return (
            list(warnings.filters),
            warnings.showwarning,
            catch.__enter__,
            catch.__exit__,
            vars(warnings)["_showwarnmsg_impl"],
        )

    def fn() -> None:
        with pytest.warns(UserWarning):
            warnings.warn("seen", stacklevel=1)
            if dist.get_rank() == 1:
                raise KeyError("lost")

    before = state()
    with pytest.raises(KeyError):
        run_threads(fn, 3)
    assert state() == before
