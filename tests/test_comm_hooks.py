"""Communication hooks against plain references."""

from __future__ import annotations

import weakref

import pytest
import torch
from buckets import assert_close, bucket_of, equal, gradients_of, mean_of, reduce
from torch.futures import Future

import phalanx as dist
from phalanx.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    debugging,
    default,
    powerSGD,
    quantization,
    register_ddp_comm_hook,
)
from phalanx.algorithms.ddp_comm_hooks.mixed_precision_hooks import (
    _AllreduceUpcastHookState,
    _reducer_allreduce_and_upcast_hook,
)
from phalanx.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from phalanx.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)
from phalanx.parallel.precision import MixedPrecision
from phalanx.testing import run_ranks

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(7, 5), (3,), (), (0,), (2, 3, 2, 2)]
LONG = [(65_537, 2), (1,)]  # more than is converted at a time


def _reduce(hook, dtype, shapes, ranks=None):
    group = None if ranks is None else dist.new_group(ranks)
    if dist._rank_not_in_group(group):
        return None
    return reduce(hook, group, gradients_of(dist.get_rank(), 0, shapes, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_allreduce(dtype, size):
    result = equal(run_ranks(_reduce, size, default.allreduce_hook, dtype, SHAPES))
    assert_close(result, mean_of(range(size), 0, SHAPES, dtype), 2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("shapes", [SHAPES, LONG], ids=["short", "long"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("hook", "half"),
    [
        (default.fp16_compress_hook, torch.float16),
        (default.bf16_compress_hook, torch.bfloat16),
        (default.fp16_compress_wrapper(default.allreduce_hook), torch.float16),
        (default.bf16_compress_wrapper(default.allreduce_hook), torch.bfloat16),
    ],
)
def test_compression(hook, half, dtype, shapes):
    """The average of the gradients as halves, rounded once."""
    result = equal(run_ranks(_reduce, 3, hook, dtype, shapes))
    halves = [[g.to(half) for g in gradients_of(rank, 0, shapes, dtype)] for rank in range(3)]
    for value, each in zip(result, zip(*halves, strict=True), strict=True):
        exact = (each[0].float() + each[1].float() + each[2].float()) / 3
        tolerance = max(torch.finfo(half).eps, torch.finfo(dtype).eps)
        torch.testing.assert_close(value, exact.to(half).to(dtype), rtol=tolerance, atol=0)


def _large():
    return reduce(default.fp16_compress_hook, None, [torch.full((5,), 60_000.0)])


def test_halves_do_not_overflow_in_the_sum():
    assert equal(run_ranks(_large, 3))[0].tolist() == [60_000.0] * 5


def _look_inside(returned):
    """Wrap a hook that looks at its bucket and returns a tensor of its own."""
    seen = {}

    def hook(state, bucket):
        seen["state"], seen["index"], seen["last"] = state, bucket.index(), bucket.is_last()
        seen["gradients"] = [gradient.clone() for gradient in bucket.gradients()]
        seen["dtype"] = bucket.buffer().dtype
        future = Future()
        future.set_result(returned(bucket.buffer()))
        return future

    given = gradients_of(0, 0, LONG)
    where = {"index": 1, "num_buckets": 2}
    result = reduce(default.bf16_compress_wrapper(hook), "state", given, **where)
    assert (seen["state"], seen["index"], seen["last"]) == ("state", 1, True)
    assert seen["dtype"] == torch.bfloat16
    for gradient, inside, value in zip(given, seen["gradients"], result, strict=True):
        assert torch.equal(inside, gradient.bfloat16())
        assert torch.equal(value, gradient.bfloat16().float() * 2)


@pytest.mark.parametrize(
    "returned",
    [lambda b: b * 2, lambda b: b.mul_(2), lambda b: [b.mul_(2)], lambda b: b.float() * 2],
    ids=["new", "in place", "list", "other dtype"],
)
def test_wrapped_hooks_see_halves(returned):
    run_ranks(_look_inside, 1, returned)


def test_noop():
    for rank, result in enumerate(
        run_ranks(_reduce, 2, debugging.noop_hook, torch.float32, SHAPES)
    ):
        for value, given in zip(result, gradients_of(rank, 0, SHAPES), strict=True):
            assert torch.equal(value, given)


QUANTIZED = [
    (quantization.quantization_pertensor_hook, None),
    (quantization.quantization_perchannel_hook, 512),
]


def _bytes_sent(hook, count):
    reduce(hook, None, gradients_of(dist.get_rank(), 0, [(count,)]))
    return [(e["op"], e["dtype"], e["bytes"]) for e in dist.group.WORLD.backend.history()]


@pytest.mark.parametrize(("hook", "channel"), QUANTIZED)
def test_bytes_are_what_is_quantized_to(hook, channel):
    count = 2001
    rows = -(-count // (channel or count))
    for sent in run_ranks(_bytes_sent, 2, hook, count):
        assert sent == [("all_gather", "uint8", count), ("all_gather", "uint8", 8 * rows)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 511, 512, 1300])
@pytest.mark.parametrize(("hook", "channel"), QUANTIZED)
@pytest.mark.parametrize("size", [1, 3])
def test_quantization_is_as_fine_as_its_scale(hook, channel, count, dtype, size):
    shapes = [(count,)]
    (result,) = equal(run_ranks(_reduce, size, hook, dtype, shapes))
    (expected,) = mean_of(range(size), 0, shapes, dtype)
    steps = torch.zeros(count, dtype=torch.float64)
    for rank in range(size):
        (given,) = gradients_of(rank, 0, shapes, dtype)
        for start in range(0, count, channel or count or 1):
            part = given[start : start + (channel or count)].double()
            steps[start : start + len(part)] += (
                part.max().clamp(min=0) - part.min().clamp(max=0)
            ) / 255
    # Half a step of each rank, and as much for the rounding of the zero point.
    slack = expected.abs() * torch.finfo(dtype).eps + 1e-6
    assert ((result.double() - expected).abs() <= steps / size + slack).all()


def _quantize(hook, each):
    return reduce(hook, None, [torch.tensor(each[dist.get_rank()])])


@pytest.mark.parametrize(("hook", "_"), QUANTIZED)
@pytest.mark.parametrize(
    "values",
    [
        [0.0, 0.0, 0.0],
        [0.0, 1e-30, 255e-30],
        [0.0, -1e-30, 254e-30],
        [3.0, 3.0, 3.0],
        [-1e38, 0.0, 3e38],
    ],
)
def test_quantization_fits_any_scale(hook, _, values):
    (result,) = equal(run_ranks(_quantize, 2, hook, [values, values]))
    torch.testing.assert_close(result, torch.tensor(values), rtol=2e-2, atol=0)


@pytest.mark.parametrize(("hook", "_"), QUANTIZED)
def test_quantization_of_the_smallest_numbers(hook, _):
    (result,) = equal(run_ranks(_quantize, 2, hook, [[-5e-43, 0.0]] * 2))
    assert result[0] <= 0
    assert result[0] > -1e-42
    assert result[1] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_quantization_tells_all_ranks_of_what_is_not_finite(bad):
    hook = quantization.quantization_perchannel_hook
    values = [[bad, 1.0] + [1.0] * 600, [1.0] * 602]
    (result,) = equal(run_ranks(_quantize, 2, hook, values))
    assert not result[:512].isfinite().any()
    torch.testing.assert_close(result[512:], torch.ones(90))


def test_channels_have_a_size():
    def work():
        hook = quantization.quantization_perchannel_hook
        gradients = gradients_of(0, 0, [(10,)])
        with pytest.raises(ValueError, match=r"bucket_size.*0"):
            hook(None, bucket_of(gradients), 0)
        return hook(None, bucket_of(gradients), bucket_size=1).wait(), gradients[0]

    result, given = run_ranks(work, 1)[0]
    torch.testing.assert_close(result, given)  # a scale for each is no loss


ALL_HOOKS = [
    default.allreduce_hook,
    default.fp16_compress_hook,
    default.bf16_compress_hook,
    quantization.quantization_pertensor_hook,
    quantization.quantization_perchannel_hook,
]


@pytest.mark.parametrize("hook", ALL_HOOKS)
def test_subgroups(hook):
    results = run_ranks(_reduce, 3, hook, torch.float32, SHAPES, [0, 2])
    assert results[1] is None
    assert_close(equal(results[::2]), mean_of([0, 2], 0, SHAPES), 0.03)


def _all_hooks():
    given = gradients_of(dist.get_rank(), 0, [(300, 40), (30, 30), (7,)])
    results = [value for hook in ALL_HOOKS for value in reduce(hook, None, given)]
    for hook in (powerSGD_hook, batched_powerSGD_hook):
        state = PowerSGDState(None, matrix_approximation_rank=3, start_powerSGD_iter=2)
        for _ in range(4):
            results += reduce(hook, state, given)
    return results


def test_the_same_bits_on_threads_and_on_processes():
    threads = equal(run_ranks(_all_hooks, 3))
    equal([threads, equal(run_ranks(_all_hooks, 3, ranks="processes"))])


def _post_local(subgroup_of, average, steps):
    rank = dist.get_rank()
    subgroup, _ = dist.new_subgroups(2) if subgroup_of else (None, None)
    state = PostLocalSGDState(None, subgroup, 2, average)
    results = []
    for step in range(steps):
        results.append(reduce(post_localSGD_hook, state, gradients_of(rank, step, SHAPES)))
    assert state.iter == 2
    return results


@pytest.mark.parametrize("subgroups", [True, False])
@pytest.mark.parametrize("average", [True, False])
def test_post_local_sgd(subgroups, average):
    by_rank = run_ranks(_post_local, 4, subgroups, average, 4)
    for rank, results in enumerate(by_rank):
        for step, result in enumerate(results):
            if step < 2 or (average and not subgroups):
                ranks = range(4)
            elif average:
                ranks = [rank // 2 * 2, rank // 2 * 2 + 1]
            else:
                ranks = [rank]
            assert_close(result, mean_of(ranks, step, SHAPES), 1e-6)


def test_a_post_local_state_can_be_saved(tmp_path, caplog):
    def work():
        rank = dist.get_rank()
        state = PostLocalSGDState(None, dist.new_subgroups(2)[0], 7, False)
        state.iter = 5
        torch.save(state, tmp_path / str(rank))
        loaded = torch.load(tmp_path / str(rank), weights_only=False)
        assert loaded.process_group is dist.group.WORLD
        assert loaded.subgroup is dist.group.WORLD
        return loaded.iter, loaded.start_localSGD_iter, loaded.post_local_gradient_allreduce

    assert run_ranks(work, 2) == [(5, 7, False)] * 2
    assert "saved without process_group and subgroup" in caplog.text


class _Model:
    def register_comm_hook(self, state, hook):
        self.state, self.hook = state, hook


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("ALLREDUCE", default.allreduce_hook),
        ("FP16_COMPRESS", default.fp16_compress_hook),
        ("BF16_COMPRESS", default.bf16_compress_hook),
        ("QUANTIZE_PER_TENSOR", quantization.quantization_pertensor_hook),
        ("QUANTIZE_PER_CHANNEL", quantization.quantization_perchannel_hook),
        ("NOOP", debugging.noop_hook),
    ],
)
def test_hooks_by_name(name, hook):
    for register in (
        lambda model: register_ddp_comm_hook(DDPCommHookType[name], model, "state"),
        lambda model: DDPCommHookType[name].value(model=model, state="state"),
    ):
        model = _Model()
        register(model)
        assert (model.state, model.hook) == ("state", hook)
    register_ddp_comm_hook(DDPCommHookType[name], model)
    assert model.state is None


@pytest.mark.parametrize(
    ("name", "hook", "rank"),
    [
        ("POWER_SGD", powerSGD.powerSGD_hook, 1),
        ("POWER_SGD_RANK2", powerSGD.powerSGD_hook, 2),
        ("BATCHED_POWER_SGD", powerSGD.batched_powerSGD_hook, 1),
        ("BATCHED_POWER_SGD_RANK2", powerSGD.batched_powerSGD_hook, 2),
    ],
)
def test_power_sgd_by_name(name, hook, rank):
    model = _Model()
    register_ddp_comm_hook(DDPCommHookType[name], model, "group")
    assert model.hook is hook
    assert model.state.process_group == "group"
    assert model.state.matrix_approximation_rank == rank
    assert model.state.start_powerSGD_iter == 1000
    DDPCommHookType[name].value(model=model, state=None, start_powerSGD_iter=10)
    assert model.state.start_powerSGD_iter == 10


def test_names_of_hooks_are_known():
    assert len(DDPCommHookType) == 10
    with pytest.raises(TypeError, match=r"'ALLREDUCE'.*known: ALLREDUCE, FP16_COMPRESS"):
        register_ddp_comm_hook("ALLREDUCE", _Model())


def test_a_reduction_in_another_type_gives_back_the_buckets_own():
    class Model:
        process_group = None
        mixed_precision = MixedPrecision(reduce_dtype=torch.float64)

    shapes = [(3, 2), (5,)]

    def work():
        model = Model()
        state = _AllreduceUpcastHookState(weakref.ref(model))
        gradients = gradients_of(dist.get_rank(), 0, shapes, torch.bfloat16)
        return reduce(_reducer_allreduce_and_upcast_hook, state, gradients)

    result = equal(run_ranks(work, 3))
    assert_close(result, mean_of([0, 1, 2], 0, shapes, torch.bfloat16), 0.01)


def test_another_buffer_may_lie_anywhere_in_its_memory():
    bucket = bucket_of([torch.ones(2, 3), torch.ones(2)])
    bucket.set_buffer(torch.arange(20.0)[5:13])
    first, second = bucket.gradients()
    assert first.tolist() == [[5, 6, 7], [8, 9, 10]]
    assert second.tolist() == [11, 12]
    bucket.set_buffer(torch.arange(8.0))
    assert bucket.gradients()[1].tolist() == [6, 7]
