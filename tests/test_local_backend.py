"""The native engine keeps the backend contract, with ranks as threads and as processes."""

from __future__ import annotations

import pytest
from torch_ranks import run_torch

import phalanx as dist
from phalanx.backends import local
from phalanx.backends.registry import BackendOptions
from phalanx.stores import HashStore
from phalanx.testing import run_ranks
from phalanx.testing.backend_kit import check_backend, check_endings, check_group


def _make(rank: int, size: int, shared: dict[str, object]) -> local.LocalBackend:
    store = shared.setdefault("store", HashStore())
    ranks = list(range(size))
    return local.create(BackendOptions(store, rank, size, 60.0, "kit", ranks, size, threads=True))


def test_contract_on_threads() -> None:
    check_backend(_make)


def _contract() -> None:
    check_group(dist.group.WORLD.transport)
    check_endings(lambda: dist.new_group().transport)


def _contract_in_a_world_of_torch_s() -> None:
    check_group(dist.group.WORLD.transport)
    check_endings(lambda: dist.new_group().transport)


def test_contract_in_a_world_of_torch_s() -> None:
    run_torch(_contract_in_a_world_of_torch_s, 2)


@pytest.mark.parametrize("size", [2, 3])
def test_contract_on_processes(size: int) -> None:
    run_ranks(_contract, size, ranks="processes")
