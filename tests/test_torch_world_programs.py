"""Programs of torch.distributed that are tested on processes, on thread ranks as well."""

import inspect
import warnings
from functools import partial

import pytest
import test_torch_backend as backend
import test_torch_compile as compiling
import test_torch_ddp as ddp
import test_torch_ecosystem as ecosystem
import test_torch_sharding as sharding
import test_torch_start as start

from phalanx.testing import torch_world

pytestmark = pytest.mark.filterwarnings("ignore")  # processes do not make errors of them

CALLS = [
    partial(backend.test_calls, backend._reductions),
    partial(backend.test_calls, backend._moves),
    partial(backend.test_calls, backend._messages),
    backend.test_works_and_futures,
    backend.test_groups,
    backend.test_worlds_one_after_the_other_in_one_store,
    backend.test_a_mismatch_names_ranks_and_lines,
    backend.test_timeouts,
    backend.test_errors_of_coalesced_operations,
    backend.test_refusals,
    ddp.test_power_sgd_communicates_in_callbacks_of_several_buckets,
    partial(ddp.test_the_others_learn_who_failed_in_backward, "raise", hooked=True),
    partial(ddp.test_the_others_learn_who_failed_in_backward, "raise", hooked=False),
    ecosystem.test_zero_redundancy_optimizer_overlaps_with_backward,
    sharding.test_data_and_tensor_parallelism_in_two_dimensions,
    start.test_groups_come_and_go_on_one_store,
    start.test_both_vocabularies_in_one_program,
    start.test_batch_norm_of_phalanx_in_a_model_of_torch,
]


def on_threads(fn, size, *args, backend="phalanx", timeout=60, return_exceptions=False):
    """Do what `torch_ranks.run_torch` does, on threads."""
    world = torch_world(size, backend=backend, timeout=timeout, return_exceptions=return_exceptions)
    return world.run(fn, *args)


class OnThreads:
    """What tests of programs ask for results, by rank."""

    def __init__(self, *_, size=2):
        self._size = size

    def of(self, program, rtol=0.0, atol=0.0):
        return torch_world(self._size).run(program)


@pytest.fixture(autouse=True)
def _threads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some programs write files there
    for module in (backend, ddp, ecosystem, sharding, start):
        if hasattr(module, "run_torch"):
            monkeypatch.setattr(module, "run_torch", on_threads)
    monkeypatch.setattr(sharding, "Outcomes", OnThreads)


def name_of(test):
    function = getattr(test, "func", test)
    return f"{function.__module__}-{function.__name__}"


@pytest.mark.parametrize("test", CALLS, ids=name_of)
def test_calls(test):
    with warnings.catch_warnings(record=True):  # torch insists on showing one of its own
        test()


PROGRAMS = [
    function
    for module in (ddp, ecosystem, sharding)
    for name, function in vars(module).items()
    if name.startswith("test_") and "outcomes" in inspect.signature(function).parameters
]
PROGRAMS.append(compiling.test_collectives_inside_one_graph)
# On any backend, torch warns of works in it at the end of the process.
PROGRAMS.remove(ecosystem.test_functional_collectives_in_place)


@pytest.mark.parametrize("test", PROGRAMS, ids=name_of)
def test_programs(test):
    test(OnThreads())
