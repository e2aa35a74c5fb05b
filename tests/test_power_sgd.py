"""PowerSGD against plain references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from buckets import assert_close, bucket_of, equal, gradients_of, mean_of, reduce

import phalanx as dist
from phalanx.algorithms.ddp_comm_hooks import default
from phalanx.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from phalanx.testing import run_ranks

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


def full_rank(**arguments):
    """Make a state that compresses every matrix from the first iteration on, without loss."""
    plain = {
        "matrix_approximation_rank": 1000,
        "min_compression_rate": 0.01,
        "start_powerSGD_iter": 0,
        "use_error_feedback": False,
        "warm_start": False,
    }
    return PowerSGDState(None, **{**plain, **arguments})


def _power(hook, shapes, steps, arguments, dtype=torch.float32):
    state = full_rank(**arguments)
    rank = dist.get_rank()
    results = [reduce(hook, state, gradients_of(rank, s, shapes, dtype)) for s in range(steps)]
    return results, state.error_dict, state.compression_stats()


MATRICES = [(9, 6), (6, 9), (5,), (), (0, 3), (6, 9), (4, 3, 2, 2), (1, 8), (8, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("size", [1, 3])
def test_power_sgd_of_full_rank_is_the_mean(size, batch, dtype):
    arguments = {"batch_tensors_with_same_shape": batch}
    outcomes = run_ranks(_power, size, powerSGD_hook, MATRICES, 2, arguments, dtype)
    halves = dtype in (torch.float16, torch.bfloat16)
    for step in range(2):
        result = equal([results[step] for results, _, _ in outcomes])
        each = [gradients_of(rank, step, MATRICES, dtype) for rank in range(size)]
        for value, same in zip(result, zip(*each, strict=True), strict=True):
            expected = torch.stack(same).to(torch.complex128).mean(0)
            tolerance = 0.05 if halves else 1e-5
            torch.testing.assert_close(
                value.to(torch.complex128), expected, rtol=tolerance, atol=tolerance
            )
    assert outcomes[0][1] == {}


def _strided(gradients):
    """Lay out gradients as channels-last and transposed parameters have them."""
    return [gradients[0].contiguous(memory_format=torch.channels_last), gradients[1].t()]


def test_power_sgd_takes_gradients_as_they_lie_in_memory():
    shapes = [(4, 3, 5, 2), (6, 9)]

    def work():
        return reduce(
            powerSGD_hook, full_rank(), _strided(gradients_of(dist.get_rank(), 0, shapes))
        )

    result = equal(run_ranks(work, 2))
    assert_close(result, _strided(mean_of([0, 1], 0, shapes)), 1e-5)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 49, 50, 63])
def test_batched_power_sgd_of_full_rank_is_the_mean(count, size):
    shapes = [(count // 2,), (count - count // 2,)]
    outcomes = run_ranks(_power, size, batched_powerSGD_hook, shapes, 2, {})
    for step in range(2):
        result = equal([results[step] for results, _, _ in outcomes])
        assert_close(result, mean_of(range(size), step, shapes), 1e-5)


@pytest.mark.parametrize("warm_start", [False, True])
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_what_power_sgd_leaves_out_is_not_lost(hook, batch, warm_start):
    """All that was reduced, and the errors that are left, add up to all gradients."""
    shapes, size, steps, early = [(8, 6), (3,), (8, 6), (10, 7)], 3, 7, 2
    arguments = {
        "matrix_approximation_rank": 1,
        "use_error_feedback": True,
        "warm_start": warm_start,
        "start_powerSGD_iter": early,
        "batch_tensors_with_same_shape": batch,
    }
    outcomes = run_ranks(_power, size, hook, shapes, steps, arguments)
    total = sum(torch.cat([v.flatten() for v in result]).double() for result in outcomes[0][0])
    left = torch.stack([errors[0] for _, errors, _ in outcomes]).double().mean(0)
    true = sum(
        torch.cat([v.flatten() for v in mean_of(range(size), step, shapes)])
        for step in range(steps)
    )
    assert left[: len(true)].abs().max() > 0.1
    torch.testing.assert_close(total + left[: len(true)], true, rtol=1e-4, atol=1e-4)
    for step in range(early):
        result = equal([results[step] for results, _, _ in outcomes])
        assert_close(result, mean_of(range(size), step, shapes), 1e-6)
    if hook is powerSGD_hook:
        start = 8 * 6
        assert (outcomes[0][1][0][start : start + 3] == 0).all()  # vectors are exact


def _constant(arguments, steps):
    state = full_rank(**arguments)
    (matrix,) = gradients_of(0, 0, [(12, 9)])
    return [reduce(powerSGD_hook, state, [matrix])[0] for _ in range(steps)], matrix


def test_a_warm_start_finds_the_best_approximation():
    arguments = {"matrix_approximation_rank": 2, "warm_start": True, "start_powerSGD_iter": 2}
    values, matrix = run_ranks(_constant, 2, arguments, 60)[0]
    u, s, v = torch.linalg.svd(matrix.double())
    best = u[:, :2] @ torch.diag(s[:2]) @ v[:2]
    torch.testing.assert_close(values[-1].double(), best, rtol=1e-3, atol=1e-3)
    cold = {"matrix_approximation_rank": 2}
    values, _ = run_ranks(_constant, 2, cold, 4)[0]
    assert not torch.allclose(values[-1], values[-2])  # another beginning each time


def test_error_feedback_averages_to_the_gradient():
    """A constant gradient gets across whole, though each approximation is of rank one."""
    arguments = {
        "matrix_approximation_rank": 1,
        "use_error_feedback": True,
        "warm_start": True,
        "start_powerSGD_iter": 2,
    }
    values, matrix = run_ranks(_constant, 2, arguments, 200)[0]
    torch.testing.assert_close(torch.stack(values).mean(0), matrix, rtol=0, atol=0.1)
    assert (values[-1] - matrix).abs().max() > 0.3


def test_epsilon_damps_short_columns():
    length, epsilon = 2.0, 0.5

    def work():
        state = full_rank(
            matrix_approximation_rank=1,
            warm_start=True,
            start_powerSGD_iter=2,
            orthogonalization_epsilon=epsilon,
        )
        direction = torch.full((4, 4), length / 4)
        return [reduce(powerSGD_hook, state, [direction])[0] for _ in range(5)], direction

    values, direction = run_ranks(work, 1)[0]
    torch.testing.assert_close(values[1], direction)
    torch.testing.assert_close(values[-1], direction * (length / (length + epsilon)) ** 2)


@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
@pytest.mark.parametrize("rank", [1, 6])
def test_power_sgd_recovers_from_zero_gradients(hook, rank):
    """Nothing of a step without gradients stays with those that come."""

    def work():
        state = full_rank(matrix_approximation_rank=rank, warm_start=True, start_powerSGD_iter=2)
        given = torch.ones(6, 6) + dist.get_rank()
        reduce(hook, state, [given])
        reduce(hook, state, [given])
        zero = [reduce(hook, state, [torch.zeros(6, 6)])[0] for _ in range(2)]
        return [*zero, reduce(hook, state, [given])[0]]

    first, second, last = equal(run_ranks(work, 2))
    assert not first.any()
    assert not second.any()
    torch.testing.assert_close(last, torch.full((6, 6), 1.5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])
def test_power_sgd_recovers_from_what_is_not_finite(hook, bad):
    def work():
        state = full_rank(warm_start=True, use_error_feedback=True, start_powerSGD_iter=2)
        good = [torch.ones(6, 5) + dist.get_rank(), torch.ones(2)]
        spoilt = [torch.ones(6, 5), torch.ones(2)]
        if dist.get_rank() == 1:
            spoilt[0][2, 3] = bad
        for _ in range(3):
            reduce(hook, state, good)
        return [reduce(hook, state, spoilt)[0], reduce(hook, state, good)[0]]

    spoilt, good = equal(run_ranks(work, 2))
    assert not spoilt.isfinite().any()
    torch.testing.assert_close(good, torch.full((6, 5), 1.5))


def test_a_bucket_that_changes_starts_anew(caplog):
    def work():
        state = full_rank(use_error_feedback=True, start_powerSGD_iter=2)
        results = []
        for step, rank, shapes in changes:
            state.matrix_approximation_rank = rank
            results += reduce(powerSGD_hook, state, gradients_of(dist.get_rank(), step, shapes))
        return results[-2:]

    shapes = [(6, 4), (5,)]
    early = [(0, 1, shapes), (1, 1, shapes)]
    for changed in (shapes[::-1], [(4, 6), (5,)], shapes):
        changes = [*early, (2, 1, shapes), (3, 4, changed)]
        assert_close(equal(run_ranks(work, 2)), mean_of([0, 1], 3, changed), 1e-5)
        assert "bucket 0 holds other gradients" in caplog.text
        caplog.clear()


def test_buckets_are_remembered_one_by_one():
    shapes = [[(6, 4)], [(3, 7), (2,)]]

    def work():
        state = full_rank(
            matrix_approximation_rank=1,
            warm_start=True,
            use_error_feedback=True,
            start_powerSGD_iter=2,
        )
        for step in range(5):
            for index in (0, 1):
                assert state.iter == step
                given = gradients_of(dist.get_rank(), step, shapes[index])
                reduce(powerSGD_hook, state, given, index=index, num_buckets=2)
        assert state.iter == 5
        return {index: len(error) for index, error in state.error_dict.items()}

    assert run_ranks(work, 2) == [{0: 24, 1: 23}] * 2


def test_compression_is_counted_and_told(caplog):
    caplog.set_level("INFO", "phalanx.hooks")
    shapes = [(20, 30), (4, 4), (9,)]
    arguments = {
        "matrix_approximation_rank": 2,
        "min_compression_rate": 2,
        "compression_stats_logging_frequency": 3,
    }
    ((_, _, stats),) = run_ranks(_power, 1, powerSGD_hook, shapes, 5, arguments)
    before, after = 5 * (600 + 16 + 9), 5 * (2 * 50 + 16 + 9)
    assert stats == (before / after, before, after)
    told = [record.getMessage() for record in caplog.records if "PowerSGD" in record.getMessage()]
    assert len(told) == 2
    assert f"{after // 5}" in told[0]
    assert f"{before // 5}" in told[0]
    ((_, _, stats),) = run_ranks(_power, 1, batched_powerSGD_hook, [(50,)], 1, arguments)
    assert stats == (50 / 32, 50, 32)
    assert PowerSGDState(None).compression_stats() == (0, 0, 0)


def test_two_exchanges_are_enough():
    def work():
        reduce(powerSGD_hook, full_rank(), gradients_of(0, 0, MATRICES))
        return [entry["op"] for entry in dist.group.WORLD.backend.history()]

    assert run_ranks(work, 2) == [["all_reduce"] * 2] * 2


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ({"start_powerSGD_iter": 1}, "start_powerSGD_iter must be at least 2.*got 1"),
        ({"start_powerSGD_iter": 1, "warm_start": False}, "start_powerSGD_iter"),
        ({"start_powerSGD_iter": 1, "use_error_feedback": False}, "start_powerSGD_iter"),
        ({"matrix_approximation_rank": 0}, "matrix_approximation_rank.*0"),
        ({"orthogonalization_epsilon": -1e-8}, "orthogonalization_epsilon.*-1e-08"),
    ],
)
def test_states_that_cannot_be(arguments, fact):
    with pytest.raises(ValueError, match=fact):
        PowerSGDState(None, **arguments)


def test_a_state_has_the_known_arguments_and_defaults():
    state = PowerSGDState(None)
    assert state.matrix_approximation_rank == 1
    assert state.start_powerSGD_iter == 1000
    assert state.min_compression_rate == 2
    assert state.use_error_feedback is True
    assert state.warm_start is True
    assert state.orthogonalization_epsilon == 0
    assert state.compression_stats_logging_frequency == 10_000
    assert state.batch_tensors_with_same_shape is False
    with pytest.raises(AttributeError):
        state.no_such_thing = 1


def _save_and_go_on(path):
    rank = dist.get_rank()
    shapes = [(8, 6), (3,)]
    state = PowerSGDState(
        dist.new_group([0, 1]),
        start_powerSGD_iter=2,
        min_compression_rate=1,
        compression_stats_logging_frequency=1,
    )
    for step in range(4):
        reduce(powerSGD_hook, state, gradients_of(rank, step, shapes))
    torch.save(state, f"{path}/{rank}")
    loaded = torch.load(f"{path}/{rank}", weights_only=False)
    assert loaded.process_group is dist.group.WORLD
    assert loaded.iter == 4
    for step in range(4, 7):
        given = gradients_of(rank, step, shapes)
        equal([reduce(powerSGD_hook, which, given) for which in (state, loaded)])
    assert loaded.compression_stats() == state.compression_stats()


def test_a_power_sgd_state_can_be_saved(tmp_path, caplog):
    run_ranks(_save_and_go_on, 2, str(tmp_path))
    told = [record for record in caplog.records if record.name == "phalanx.hooks"]
    assert len(told) == 4
    assert all(record.levelname == "WARNING" for record in told)
    assert sum("saved without process_group" in record.getMessage() for record in told) == 2
    assert sum("default process group" in record.getMessage() for record in told) == 2
    # Also where there is no world.
    assert torch.load(tmp_path / "0", weights_only=False).process_group is None


def test_wrapped_power_sgd():
    def work():
        state = full_rank()
        hook = default.bf16_compress_wrapper(powerSGD_hook)
        return reduce(hook, state, gradients_of(dist.get_rank(), 0, [(9, 6), (4,)]))

    assert_close(equal(run_ranks(work, 2)), mean_of([0, 1], 0, [(9, 6), (4,)]), 0.05)


def test_a_failed_exchange_is_forgotten():
    """Where the exchange of Q fails, ranks must not go on with what each has of its own."""

    def work():
        if dist.get_rank() == 1:
            dist.all_reduce(torch.zeros(6), op=dist.ReduceOp.AVG)
            with pytest.raises(dist.CollectiveMismatch):
                dist.barrier()
            return None
        state = full_rank(matrix_approximation_rank=1, warm_start=True, start_powerSGD_iter=2)
        state.iter = 2
        future = powerSGD_hook(state, bucket_of([torch.ones(6, 4)]))
        with pytest.raises(Exception, match="barrier"):
            future.wait()
        return len(state.q_memory_dict)

    assert run_ranks(work, 2) == [0, None]


def _layouts():
    state = full_rank(warm_start=True, use_error_feedback=True, start_powerSGD_iter=2)
    state.iter = 2
    shapes = [[(4, 3)], [(2, 6)], [(3, 3), (3,)], [(3, 3), (3,)]]
    rank = dist.get_rank()
    return [
        reduce(powerSGD_hook, state, gradients_of(rank, step, each))
        for step, each in enumerate(shapes)
    ]


def test_a_bucket_that_changes_again_and_again_is_the_mean():
    shapes = [[(4, 3)], [(2, 6)], [(3, 3), (3,)], [(3, 3), (3,)]]
    results = run_ranks(_layouts, 3)
    for step, each in enumerate(shapes):
        result = equal([result[step] for result in results])
        assert_close(result, mean_of([0, 1, 2], step, each), 1e-5)


def test_nothing_is_left_out_beside_the_gradients():
    arguments = {
        "matrix_approximation_rank": 1,
        "use_error_feedback": True,
        "start_powerSGD_iter": 2,
    }

    def work():
        state = full_rank(**arguments)
        state.iter = 2
        reduce(batched_powerSGD_hook, state, gradients_of(dist.get_rank(), 0, [(7,)]))
        return state.error_dict[0]

    for error in run_ranks(work, 3):
        assert error.shape == (9,)
        assert bool(error[:7].any())
        assert not bool(error[7:].any())


@pytest.mark.parametrize(("warm_start", "draws"), [(True, 1), (False, 3)])
def test_how_often_a_state_draws(warm_start, draws):
    def work():
        state = full_rank(warm_start=warm_start, start_powerSGD_iter=2, random_seed=5)
        state.iter = 2
        for step in range(3):
            reduce(powerSGD_hook, state, gradients_of(dist.get_rank(), step, [(4, 3)]))
        return int(state.rng.randint(1_000_000_000))

    fresh = np.random.RandomState(5)
    for _ in range(draws):
        fresh.randint(1_000_000_000)
    assert run_ranks(work, 2) == [int(fresh.randint(1_000_000_000))] * 2


def test_a_matrix_is_compressed_only_if_it_becomes_smaller_by_more_than_that():
    for shape, after in (((4, 4), 16), ((4, 5), 9)):  # 16 / 8 is 2, 20 / 9 is more
        arguments = {"matrix_approximation_rank": 1, "min_compression_rate": 2}
        ((_, _, stats),) = run_ranks(_power, 1, powerSGD_hook, [shape], 1, arguments)
        assert stats[2] == after
