"""Every two features of DistributedDataParallel together, against one process with all the data.

Ranks have batches of different sizes, losses of different weights and parts of the model that only
some of them use, so that a wrong divisor, a term that is missing or taken twice, or another rank's
buffer shows in the numbers. All is in float64, but for what a feature itself rounds.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import phalanx as dist
from phalanx import DistributedDataParallel as DDP
from phalanx.algorithms.ddp_comm_hooks import (
    DDPCommHookType,
    powerSGD_hook,
    register_ddp_comm_hook,
)
from phalanx.algorithms.join import Join
from phalanx.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from phalanx.parallel.precision import MixedPrecision
from phalanx.testing import run_ranks

SIZE = 3
LENGTHS = (2, 4, 3)  # steps of each rank under Join
RATE = 0.125


def num_steps(on: frozenset[str]) -> int:
    """Return how many steps show all: buckets change after the first, PowerSGD begins later."""
    return 4 if on & {"power", "join"} else 3


# What a feature is allowed to be off by, relative to the largest gradient; 1e-10 for the others.
ROUNDING = {"fp16": 2e-3, "bf16": 2e-2, "quantize": 2e-2, "mixed": 3e-6, "power": 1e-8}
HOOKS = {
    "fp16": DDPCommHookType.FP16_COMPRESS,
    "bf16": DDPCommHookType.BF16_COMPRESS,
    "quantize": DDPCommHookType.QUANTIZE_PER_CHANNEL,
}
FEATURES = (
    *("unused", "static", "accumulate", "view", "fp16", "bf16", "quantize", "power", "mixed"),
    *("join", "sparse", "syncbn", "buffers", "checkpoint", "graph", "twice", "zero"),
    *("in_backward", "delayed"),
)


class Net(nn.Module):
    """A model whose rows belong to ranks: one of a rank has its own rows, the oracle has all."""

    def __init__(self, on: frozenset[str], ranks: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.on = on
        self.inner = nn.Linear(5, 4)
        if "sparse" in on:
            self.table = nn.Embedding(6, 4, sparse=True)
        if on & {"unused", "static"}:
            self.never = nn.Linear(2, 3)
        if "unused" in on:
            self.spare = nn.Linear(5, 4)
        if "syncbn" in on:
            self.norm = dist.SyncBatchNorm(4) if ranks == 1 else nn.BatchNorm1d(4)
        if "buffers" in on:
            self.register_buffer("offset", torch.zeros(ranks))
        self.outer = nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
        hidden = (
            checkpoint(self.inner, x, use_reentrant=True)
            if "checkpoint" in self.on
            else self.inner(x)
        )
        if "sparse" in self.on:
            hidden = hidden + self.table(ids)
        if "unused" in self.on:
            chosen = (rows != 1).nonzero()[:, 0]  # rank 1 does not use it
            if len(chosen):
                hidden = hidden.index_add(0, chosen, self.spare(x[chosen]))
        if "syncbn" in self.on:
            hidden = self.norm(hidden)
        result = self.outer(hidden.tanh())
        if "buffers" in self.on:
            places = rows if len(self.offset) > 1 else torch.zeros_like(rows)
            result = result * (1 + self.offset.to(result.dtype)[places, None])
            for rank in rows.unique():
                self.offset[places[rows == rank][0]] += x.detach()[rows == rank].mean() + rank / 8
        return result


def batch(step: int, part: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows of one rank: inputs, indices into the table, and whose they are."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
    count = 2 + (2 * rank + part) % 4
    x = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    ids = torch.randint(6 - rank, (count,), generator=generator)
    return x.requires_grad_(), ids, torch.full((count,), rank)


def loss_of(output: Tensor, rank: int) -> Tensor:
    return (output.double() - 0.3 * rank).square().mean() * (1 + 0.75 * rank)


@dataclass
class Step:
    """What holds after one step: gradients before the update, parameters after it, buffers."""

    grads: dict[str, Tensor | None] = field(default_factory=dict)
    params: dict[str, Tensor] = field(default_factory=dict)
    offsets: Tensor | None = None


def _optimizer(on: frozenset[str], params, kind=torch.optim.SGD):
    momentum = 0.0 if "sparse" in on else 0.5
    return kind(params, lr=RATE, momentum=momentum)


def _gradients(net: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.detach().to_dense().clone()
        for name, p in net.named_parameters()
    }


def _parts(on: frozenset[str]) -> list[list[int]]:
    """Return the backward passes of a step, each with the batches whose losses it adds up."""
    per_pass = 2 if "twice" in on else 1
    passes = 3 if "accumulate" in on else 1
    return [list(range(i * per_pass, (i + 1) * per_pass)) for i in range(passes)]


def oracle(on: frozenset[str]) -> list[Step]:
    """Train in one process with the rows of all ranks."""
    net = Net(on, SIZE)
    optimizer = _optimizer(on, net.parameters())
    steps, synchronises = [], True
    for step in range(num_steps(on)):
        active = [r for r in range(SIZE) if "join" not in on or step < LENGTHS[r]]
        # Hooks average over all ranks, whoever has input.
        divisor = SIZE if on & {*HOOKS, "power"} else len(active)
        optimizer.zero_grad()
        passes = _parts(on)
        for i, parts in enumerate(passes):
            total = torch.zeros((), dtype=torch.float64)
            for part in parts:
                if "buffers" in on and synchronises:
                    net.offset.fill_(net.offset[active[-1] if "join" in on else 0].item())
                rows = [batch(step, part, rank) for rank in active]
                x, ids, whose = (torch.cat(each) for each in zip(*rows, strict=True))
                output = net(x, ids, whose)
                for rank in active:
                    total = total + loss_of(output[whose == rank], rank) / divisor
                synchronises = i == len(passes) - 1
            total.backward()
        result = Step(_gradients(net))
        optimizer.step()
        result.params = {name: p.detach().clone() for name, p in net.named_parameters()}
        result.offsets = net.offset.clone() if "buffers" in on else None
        steps.append(result)
    return steps


def _wrap(on: frozenset[str]) -> tuple[Net, DDP]:
    net = Net(on, 1)
    options: dict[str, object] = {"bucket_cap_mb": 0.0001}
    if "delayed" in on:
        late = [(f"outer.{name}", p) for name, p in net.outer.named_parameters()]
        options |= {
            "delay_all_reduce_named_params": late,
            "param_to_hook_all_reduce": net.inner.weight,
        }
    if "in_backward" in on:
        momentum = 0.0 if "sparse" in on else 0.5
        _apply_optimizer_in_backward(
            torch.optim.SGD, net.parameters(), {"lr": RATE, "momentum": momentum}
        )
    if "mixed" in on:
        options["mixed_precision"] = MixedPrecision(torch.float32, torch.float32)
    ddp = DDP(
        net,
        find_unused_parameters="unused" in on,
        static_graph="static" in on,
        gradient_as_bucket_view="view" in on,
        **options,  # type: ignore[arg-type]
    )
    for name in sorted(on & HOOKS.keys()):
        register_ddp_comm_hook(HOOKS[name], ddp)
    if "power" in on:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=9, start_powerSGD_iter=2, min_compression_rate=0.01
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return net, ddp


def train(on: frozenset[str]) -> list[Step]:
    """Train this rank's part."""
    rank = dist.get_rank()
    net, ddp = _wrap(on)
    kind = ZeroRedundancyOptimizer if "zero" in on else None
    optimizer = None
    if kind is not None:
        optimizer = ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.SGD, lr=RATE, momentum=0.0 if "sparse" in on else 0.5
        )
    elif "in_backward" not in on:
        optimizer = _optimizer(on, net.parameters())
    joinables = [ddp, *([optimizer] if "zero" in on else [])]
    steps = []
    with Join(joinables, enable="join" in on, divide_by_initial_world_size=False):
        for step in range(LENGTHS[rank] if "join" in on else num_steps(on)):
            if optimizer is not None:
                optimizer.zero_grad()
            passes = _parts(on)
            for i, parts in enumerate(passes):
                with nullcontext() if i == len(passes) - 1 else ddp.no_sync():
                    batches = [batch(step, part, rank) for part in parts]
                    outputs = [ddp(*inputs) for inputs in batches]
                    loss = sum(loss_of(output, rank) for output in outputs)
                    loss.backward(create_graph="graph" in on)
                    for inputs, *_ in batches:
                        inputs.grad = None
            result = Step(_gradients(net))
            if optimizer is not None:
                optimizer.step()
            result.params = {name: p.detach().clone() for name, p in net.named_parameters()}
            result.offsets = net.offset.clone() if "buffers" in on else None
            steps.append(result)
    final = {name: p.detach().clone() for name, p in net.named_parameters()}
    # A gradient with a graph and what it is the gradient of hold each other, and the graph the
    # world, for ever: so none is left, here and of the inputs.
    net.zero_grad()
    return [*steps, Step(params=final)]


def _check(on: frozenset[str], rank: int, ours: list[Step], theirs: list[Step]) -> None:
    tolerance = max((ROUNDING.get(name, 0) for name in on), default=0) or 1e-10

    def compare(what: str, a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> None:
        size = max(float(v.abs().max()) for v in b.values() if v is not None)
        for name in b:
            mine, true = a[name], b[name]
            if true is None or mine is None:
                assert mine is true, f"{what}: {name} is {mine}, should be {true}"
                continue
            assert mine.dtype == true.dtype, (what, name)
            torch.testing.assert_close(
                mine,
                true,
                rtol=0,
                atol=tolerance * size,
                msg=f"{what}: {name}: {mine} is not {true}",
            )

    for i, (mine, true) in enumerate(zip(ours[:-1], theirs, strict=False)):
        where = f"rank {rank}, step {i}"
        if "in_backward" in on:
            assert all(grad is None for grad in mine.grads.values()), where
        else:
            compare(f"{where}, gradient", mine.grads, true.grads)
        compare(f"{where}, parameter", mine.params, true.params)
        if true.offsets is not None:
            assert mine.offsets is not None
            torch.testing.assert_close(
                mine.offsets[0], true.offsets[rank], rtol=0, atol=tolerance, msg=f"{where}, buffer"
            )
    compare(f"rank {rank}, at the end", ours[-1].params, theirs[-1].params)


def run(on: frozenset[str]) -> None:
    """Train on ranks and in one process, and compare."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "static_graph finds unused", UserWarning)
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph", UserWarning)
        results = run_ranks(train, SIZE, on)
    theirs = oracle(on)
    for rank, ours in enumerate(results):
        _check(on, rank, ours, theirs)


# Pairs that are refused, and what the error speaks of.
REFUSED = {
    frozenset(pair): message
    for pairs, message in (
        # One hook reduces a bucket, and an optimizer in backward is one.
        (
            itertools.combinations([*HOOKS, "power", "in_backward"], 2),
            "register_comm_hook .* can only be called once",
        ),
        # What a rank without input cannot go along with.
        (
            [("join", "syncbn"), ("join", "twice"), ("join", "delayed")],
            r"does not match across ranks(.|\n)*a rank that has left its loop shadows, under Join",
        ),
        ([("checkpoint", "twice")], "mark a variable ready only once(.|\\n)*static_graph=True"),
        ([("delayed", "mixed")], "outer.weight is torch.float64 and is left alone by mixed_precis"),
        ([("delayed", "in_backward")], "stepped during backward, but reduced at its end"),
    )
    for pair in pairs
}


# Some of three, where two meet in what the third leaves behind.
MORE = (
    {"join", "sparse", "zero"},
    {"join", "static", "unused"},
    *(
        {"join", "mixed", "sparse"},
        {"mixed", "sparse", "unused"},
        {"accumulate", "mixed", "sparse"},
    ),
    *({"join", "in_backward", "sparse"}, {"accumulate", "buffers", "join"}),
    *(
        {"join", "unused", "zero"},
        {"checkpoint", "static", "twice"},
        {"accumulate", "graph", "view"},
    ),
    *({"accumulate", "mixed", "syncbn"}, {"fp16", "join", "sparse"}, {"delayed", "graph", "twice"}),
)


def _pairs() -> Iterator[frozenset[str]]:
    yield frozenset()
    for name in FEATURES:
        yield frozenset({name})
    for pair in itertools.combinations(FEATURES, 2):
        if "bf16" not in pair:  # one of the two halves is enough
            yield frozenset(pair)
    yield from map(frozenset, MORE)


@pytest.mark.parametrize("on", list(_pairs()), ids=lambda on: "+".join(sorted(on)) or "plain")
def test_a_pair(on: frozenset[str]) -> None:
    if on in REFUSED:
        with pytest.raises(Exception, match=REFUSED[on]):
            run(on)
    else:
        run(on)
