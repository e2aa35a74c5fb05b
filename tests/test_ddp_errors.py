"""What DistributedDataParallel says when ranks do not train the same thing."""

import copy
import re
from collections import OrderedDict

import pytest
import torch
from models import assert_close, batches, loss_of, mlp, own
from torch import nn

import phalanx as dist
from phalanx import DistributedDataParallel as DDP
from phalanx.testing import run_ranks


class Branches(nn.Module):
    """Two layers, of which each rank uses those it is told to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(6, 3, bias=False), nn.Linear(6, 3, bias=False)

    def forward(self, x, used):
        return sum(getattr(self, name)(x) for name in used)


def _unused(used, options, steps=1):
    """Run some steps; return what each of them raised, and the gradients."""
    model = Branches()
    ddp = DDP(model, **options)
    errors = []
    for _ in range(steps):
        ddp.zero_grad()
        try:
            ddp(own(batches(1)[0]), used[dist.get_rank()]).sum().backward()
        except RuntimeError as error:
            errors.append(str(error))
        else:
            errors.append("")
    return errors, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_an_unused_parameter_is_named_on_every_rank_in_the_same_iteration(ranks):
    used = [["left", "right"], ["left"], ["left", "right"]]
    for errors, _ in run_ranks(_unused, 3, used, {}, 2, ranks=ranks):
        for error in errors:  # the group can be used again
            assert "did not receive grad for rank 1: right.weight" in error
            assert "rank 0: right" not in error
            assert "find_unused_parameters=True" in error


def test_a_parameter_that_nobody_uses_is_named():
    for errors, _ in run_ranks(_unused, 2, [["left"], ["left"]], {}):
        for rank in range(2):
            assert f"did not receive grad for rank {rank}: right.weight" in errors[0]


def test_unused_parameters_can_be_allowed():
    used = [["left", "right"], ["left"]]
    results = run_ranks(_unused, 2, used, {"find_unused_parameters": True}, 3)
    for errors, (left, right) in results:
        assert errors == ["", "", ""]
        assert torch.equal(left, results[0][1][0])
        assert torch.equal(right, results[0][1][1])
        assert bool(right.any())


def test_what_no_rank_used_is_left_alone():
    options = {"find_unused_parameters": True}
    for _, (left, right) in run_ranks(_unused, 2, [["left"], ["left"]], options, 2):
        assert left is not None
        assert right is None


def _untouched(static):
    model = Branches()
    ddp = DDP(model, find_unused_parameters=not static, static_graph=static)
    model.right.weight.grad = torch.full((3, 6), 1 / 3)
    before = model.right.weight.grad.clone()
    for _ in range(3):
        ddp(own(batches(1)[0]), ["left"]).sum().backward()
    assert torch.equal(model.right.weight.grad, before)


@pytest.mark.parametrize("static", [False, True])
def test_an_earlier_gradient_of_an_unused_parameter_stays_bitwise(static):
    run_ranks(_untouched, 3, static)


def _in_a_group():
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return ""
    ddp = DDP(Branches(), process_group=group)
    used = ["left"] if dist.get_rank() == 2 else ["left", "right"]
    with pytest.raises(RuntimeError) as caught:
        ddp(own(batches(1)[0]), used).sum().backward()
    return str(caught.value)


def test_ranks_in_messages_are_those_of_the_world():
    _, second, third = run_ranks(_in_a_group, 3)
    assert "did not receive grad for rank 2: 1" in third  # the index on this rank
    for message in (second, third):
        assert "did not receive grad for rank 2: right.weight" in message
        assert "received grad on rank 1" in message


def _could_be_static(changes):
    ddp = DDP(Branches(), find_unused_parameters=True)
    for step in range(3):
        used = ["left"] if changes and step == 1 else ["left", "right"]
        ddp(own(batches(1)[0]), used).sum().backward()
    return ddp._get_ddp_logging_data()["can_set_static_graph"]


@pytest.mark.parametrize("changes", [False, True])
def test_whether_the_graph_could_be_called_static(changes):
    assert run_ranks(_could_be_static, 2, changes) == [not changes] * 2


def _carried():
    """Use a parameter in a pass that is not reduced, and not in the one that is."""
    model = Branches()
    ddp = DDP(model)
    rank = dist.get_rank()
    x = torch.arange(12.0).view(2, 6) * (rank + 1)
    for _ in range(2):
        ddp.zero_grad()
        with ddp.no_sync():
            ddp(x, ["left", "right"]).sum().backward()
        ddp(x, ["left"]).sum().backward()
        rows = x.sum(0) * 2 / (rank + 1)  # the average over ranks 1, 2, 3
        assert_close([model.right.weight.grad], [rows.expand(3, 6)])
        assert_close([model.left.weight.grad], [2 * rows.expand(3, 6)])
    # What was carried once does not count later.
    ddp.zero_grad()
    with pytest.raises(RuntimeError, match=r"did not receive grad for rank 1: right\.weight"):
        ddp(x, ["left"] if rank == 1 else ["left", "right"]).sum().backward()


def test_gradients_of_passes_that_were_not_reduced_count_once():
    run_ranks(_carried, 3)


def _changed_by_rank():
    """Leave a gradient of the step before, which each rank has changed, to a pass without it."""
    model = Branches()
    ddp = DDP(model, find_unused_parameters=True)
    ddp(own(batches(1)[0]), ["left", "right"]).sum().backward()
    model.right.weight.grad.mul_(dist.get_rank() + 1)
    before = model.right.weight.grad.clone()
    model.left.weight.grad = None
    ddp(own(batches(1)[0]), ["left"]).sum().backward()
    assert torch.equal(model.right.weight.grad, before)


def test_a_gradient_that_no_rank_adds_to_stays_each_ranks_own():
    run_ranks(_changed_by_rank, 3)


def _skips():
    model = Branches()
    ddp = DDP(
        model,
        find_unused_parameters=True,
        skip_all_reduce_unused_params=True,
        bucket_cap_mb=0.00001,
    )
    for _ in range(2):
        ddp(own(batches(1)[0]), ["left"]).sum().backward()
    return ddp._get_ddp_logging_data()["num_buckets_reduced"], model.right.weight.grad


def test_unused_buckets_can_be_skipped():
    assert run_ranks(_skips, 2) == [(1, None), (1, None)]


def _two_losses():
    """Parts of the model in backward passes of their own, which is as good as in one."""
    model = Branches()
    alone = copy.deepcopy(model)
    ddp = DDP(ModuleOfTwo(model))
    for batch in batches(3):
        ddp.zero_grad()
        alone.zero_grad()
        for output in ddp(own(batch)):
            loss_of(output).backward()
        for name in ("left", "right"):
            loss_of(alone(batch, [name])).backward()
        assert_close([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


class ModuleOfTwo(nn.Module):
    def __init__(self, branches):
        super().__init__()
        self.branches = branches

    def forward(self, x):
        return self.branches.left(x), self.branches.right(x)


def test_several_backward_passes_make_one():
    run_ranks(_two_losses, 2)


def _half_of_it():
    ddp = DDP(ModuleOfTwo(Branches()))
    first, _ = ddp(own(batches(1)[0]))
    loss_of(first).backward()
    with pytest.raises(RuntimeError, match=r"did not receive grad for rank 0: branches.right"):
        ddp(own(batches(1)[0]))


def test_an_output_that_is_never_used_is_told_in_the_next_forward_pass():
    run_ranks(_half_of_it, 2)


def _frozen(where):
    model = Branches()
    ddp = DDP(model)
    ddp(own(batches(1)[0]), ["left", "right"]).sum().backward()
    ddp.zero_grad()
    if where == "everywhere" or dist.get_rank() == 1:
        model.right.weight.requires_grad_(False)
    ddp(own(batches(1)[0]), ["left", "right"]).sum().backward()
    return model.left.weight.grad, model.right.weight.grad


def test_parameters_may_be_frozen_on_all_ranks():
    (left, right), (other, _) = run_ranks(_frozen, 2, "everywhere")
    assert right is None
    assert torch.equal(left, other)


def test_parameters_may_not_be_frozen_on_some_ranks():
    for error in run_ranks(_frozen, 2, "one", return_exceptions=True):
        assert isinstance(error, RuntimeError)


def _unfrozen():
    model = Branches()
    model.right.weight.requires_grad_(False)
    ddp = DDP(model)
    ddp(own(batches(1)[0]), ["left", "right"]).sum().backward()
    model.right.weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"right\.weight was frozen"):
        ddp(own(batches(1)[0]), ["left", "right"])


def test_a_parameter_that_is_unfrozen_later_is_an_error():
    run_ranks(_unfrozen, 2)


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.armed:
            raise ArithmeticError("in the middle")
        return grad, None


class Fragile(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, armed):
        return self.second(Explodes.apply(self.first(x), armed))


def _interrupted():
    ddp = DDP(Fragile(), bucket_cap_mb=0.00001)
    outcomes = []
    for step in range(4):
        ddp.zero_grad()
        try:
            ddp(own(batches(1)[0]), dist.get_rank() == 1 and step == 2).sum().backward()
        except (RuntimeError, ArithmeticError) as error:
            outcomes.append(f"{type(error).__name__} {error}")
        else:
            outcomes.append("")
    return outcomes, ddp.module.first.weight.grad


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_a_backward_pass_left_by_an_exception_is_told_to_the_others(ranks):
    (first, grad), (second, other) = run_ranks(_interrupted, 2, ranks=ranks)
    assert second[:2] == first[:2] == ["", ""]
    assert "ArithmeticError" in second[2]
    assert re.search(r"RuntimeError.*rank 1.*exception", first[2])
    assert second[3] == first[3] == ""
    assert torch.equal(grad, other)


# The model


def _different(kind):
    rank = dist.get_rank()
    sizes = {"shape": 4 + (rank == 1), "count": 4, "order": 6, "dtype": 4}
    model = nn.Sequential(nn.Linear(6, sizes[kind]), nn.Linear(sizes[kind], 3))
    if rank == 1 and kind == "count":
        model.append(nn.Linear(3, 3))
    if kind == "order":  # the same names and shapes, in another order on one rank
        layers = [("a", nn.Linear(6, 6)), ("b", nn.Linear(6, 6))]
        model = nn.Sequential(OrderedDict(layers[:: 1 if rank != 1 else -1]))
    if rank == 1 and kind == "dtype":
        model[1].double()
    DDP(model)


@pytest.mark.parametrize(
    ("kind", "fact"),
    [
        ("shape", r"rank  1: .*0\.weight: float32\[5, 6\]"),
        ("count", r"rank  1: 6 parameters, of these 2\.weight"),
        ("order", "rank  1: 4 parameters, in the order b.weight, b.bias, a.weight"),
        ("dtype", r"rank  1: .*1\.weight: float64"),
    ],
)
def test_a_model_that_differs_is_described_on_every_rank(kind, fact):
    for error in run_ranks(_different, 3, kind, return_exceptions=True):
        assert isinstance(error, RuntimeError)
        assert re.search(fact, str(error)), str(error)
        assert "ranks 0, 2: " in str(error)


def _named_otherwise():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(OrderedDict([(f"layer{rank}", nn.Linear(3, 2, bias=False))]))
    ddp = DDP(model)
    ddp(torch.tensor([[1.0, 2.0, 3.0]]) * (rank + 1)).sum().backward()
    (weight,) = ddp.parameters()
    return weight.detach(), weight.grad


def test_parameters_may_have_other_names():
    for weight, grad in (results := run_ranks(_named_otherwise, 3)):
        assert weight.equal(results[0][0])
        assert grad.equal(torch.tensor([[2.0, 4.0, 6.0]] * 2))


def _nonsense(kind):
    model = mlp()
    calls = {
        "nothing": lambda: DDP(nn.ReLU()),
        "frozen": lambda: DDP(model.requires_grad_(False)),
        "devices": lambda: DDP(model, device_ids=[0]),
        "output": lambda: DDP(model, output_device=0),
        "lazy": lambda: DDP(nn.LazyLinear(3)),
        "delay": lambda: DDP(model, delay_all_reduce_named_params=[("0.weight", model[0].weight)]),
        "group": lambda: DDP(model, process_group="world"),
        "mesh": lambda: DDP(model, device_mesh=dist.init_device_mesh("cpu", (2, 1))),
        "hook": lambda: DDP(model).register_comm_hook(None, "hook"),
        "rate": lambda: DDP(model)._set_ddp_runtime_logging_sample_rate(0),
        "meta": lambda: DDP(nn.Linear(2, 2, device="meta")),
    }
    calls[kind]()


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("nothing", RuntimeError),
        ("frozen", RuntimeError),
        ("devices", ValueError),
        ("output", ValueError),
        ("lazy", RuntimeError),
        ("delay", ValueError),
        ("group", ValueError),
        ("mesh", RuntimeError),
        ("hook", TypeError),
        ("rate", ValueError),
        ("meta", ValueError),
    ],
)
def test_nonsense(kind, error):
    for result in run_ranks(_nonsense, 2, kind, return_exceptions=True):
        assert isinstance(result, error), result


def _changed_type():
    model = mlp()
    ddp = DDP(model)
    model.double()
    with pytest.raises(RuntimeError, match=r"3\.bias.*float64"):
        ddp(own(batches(1)[0]).double()).sum().backward()


def test_a_type_that_changes_after_wrapping():
    run_ranks(_changed_type, 1)


def _static_changes(more):
    ddp = DDP(Branches(), static_graph=True)
    first, then = (["left"], ["left", "right"]) if more else (["left", "right"], ["left"])
    ddp(own(batches(1)[0]), first).sum().backward()
    with pytest.raises(RuntimeError, match=r"graph has changed(?s:.*)right\.weight"):
        ddp(own(batches(1)[0]), then).sum().backward()


@pytest.mark.parametrize("more", [True, False])
def test_a_static_graph_that_changes(more):
    run_ranks(_static_changes, 2, more)


def _late_static():
    ddp = DDP(mlp())
    ddp(own(batches(1)[0])).sum().backward()
    with pytest.raises(RuntimeError, match="before training"):
        ddp._set_static_graph()


def test_a_static_graph_is_promised_before_training():
    run_ranks(_late_static, 1)


def _dies():
    ddp = DDP(mlp())
    for step in range(3):
        if dist.get_rank() == 1 and step == 1:
            raise ValueError("no more data")
        ddp(own(batches(1)[0])).sum().backward()


def test_a_rank_that_fails_between_steps_is_named_in_backward():
    first, second = run_ranks(_dies, 2, return_exceptions=True)
    assert isinstance(second, ValueError)
    assert isinstance(first, dist.PeerFailed)
    assert "rank 1" in str(first)
    assert re.search(r"test_ddp_errors\.py:\d+ in _dies", str(first))


def _late(cap):
    dist.group.WORLD.set_timeout(0.5)
    store = dist.group.WORLD.get_group_store()
    ddp = DDP(mlp(), bucket_cap_mb=cap)
    outcomes = []
    for step in range(4):
        ddp.zero_grad()
        if dist.get_rank() == 1 and step == 2:
            store.wait(["given up"], 30)
        try:
            ddp(own(batches(1)[0])).sum().backward()
        except dist.DistTimeout:
            outcomes.append("late")
            store.set("given up", "")
        else:
            outcomes.append("")
    return outcomes, ddp.module[0].weight.grad


@pytest.mark.parametrize("cap", [25, 0.0004])
def test_training_goes_on_after_a_timeout(cap):
    (first, grad), (second, other) = run_ranks(_late, 2, cap)
    assert first == second == ["", "", "late", ""]
    assert torch.equal(grad, other)
