"""The rules for works, order, threads, and for what a backend tells of itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from phalanx.backends.base import GroupBackend
from phalanx.errors import DistTimeout
from phalanx.testing.backend_kit.inputs import Rule, inputs_of, is_reduction, same, started, values
from phalanx.types import ReduceOp


def works(backend: GroupBackend) -> None:
    """Works end well in any order of waiting, and say so; their results are the outputs."""
    tensors = [values(backend.rank, (100,), torch.float32, salt) for salt in range(6)]
    open_works = [
        started(backend.all_reduce(tensor, ReduceOp.SUM, async_op=True)) for tensor in tensors
    ]
    for i in (3, 0, 5, 1, 4, 2):
        work = open_works[i]
        assert work.wait(), "wait() must return True"
        assert work.wait(60), "wait() must return True each time"
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        inputs = inputs_of(backend, (100,), torch.float32, i)
        is_reduction(backend, tensors[i], inputs, ReduceOp.SUM, i)
    result = open_works[0].result()
    assert len(result) == 1
    same(result[0], tensors[0])
    same(open_works[1].get_future().wait()[0], tensors[1])
    try:
        source = open_works[2].source_rank()
    except ValueError:
        return
    raise AssertionError(f"only a receive has a source rank, got {source}")


def works_of_every_collective(backend: GroupBackend) -> None:
    """Each collective can be asynchronous: many in flight, waited for in another order."""
    rank, size = backend.rank, backend.size
    own = float(rank + 1)
    everybody = [float(other + 1) for other in range(size)]
    total = sum(everybody)
    last = size - 1

    def full(value: float) -> Tensor:
        return torch.full((3,), value)

    def several() -> list[Tensor]:
        return [torch.zeros(3) for _ in range(size)]

    def whole() -> Tensor:
        return torch.zeros(3 * size)

    stacked = torch.cat([full(value) for value in everybody])
    outputs, inputs = several(), [full(own + 10 * other) for other in range(size)]
    exchanged = [full(value + 10 * rank) for value in everybody]
    gathered = several() if rank == last else None
    scattered = [full(value) for value in everybody] if rank == last else None
    cases: list[tuple[str, tuple[Any, ...], list[Tensor]]] = [
        ("all_reduce", (full(own), ReduceOp.SUM), [full(total)]),
        ("broadcast", (full(own), last), [full(everybody[last])]),
        ("reduce", (full(own), 0, ReduceOp.MAX), [full(everybody[last] if rank == 0 else own)]),
        ("all_gather", (several(), full(own)), list(stacked.view(size, 3))),
        ("all_gather_single", (whole(), full(own)), [stacked]),
        ("gather", (gathered, full(own), last), list(stacked.view(size, 3)) if gathered else []),
        ("scatter", (torch.zeros(3), scattered, last), [full(own)]),
        ("reduce_scatter", (torch.zeros(3), [full(own)] * size, ReduceOp.SUM), [full(total)]),
        ("reduce_scatter_single", (torch.zeros(3), full(own).repeat(size), ReduceOp.SUM),
         [full(total)]),
        ("all_to_all", (outputs, inputs), exchanged),
        ("all_to_all_single", (whole(), torch.cat(inputs), None, None), [torch.cat(exchanged)]),
        ("barrier", (), []),
    ]  # fmt: skip
    open_works = [started(getattr(backend, name)(*args, async_op=True)) for name, args, _ in cases]
    for (name, args, expected), work in reversed(list(zip(cases, open_works, strict=True))):
        assert work.wait(), f"wait() of {name} must return True"
        found = args[0] if args else None
        outputs = [found] if isinstance(found, Tensor) else found or []
        for got, wanted in zip(outputs, expected, strict=True):
            same(got, wanted, name)


def order(backend: GroupBackend) -> None:
    """Collectives run in the order in which they were issued, asynchronous or not."""
    size = float(backend.size)
    tensor, output = torch.ones(2000), torch.zeros(backend.size, 2000)
    first = started(backend.all_reduce(tensor, ReduceOp.SUM, async_op=True))
    second = started(backend.all_gather_single(output, tensor, async_op=True))
    backend.all_reduce(tensor, ReduceOp.SUM)
    same(tensor, torch.full((2000,), size**2))
    same(output, torch.full((backend.size, 2000), size))
    assert first.wait()
    assert second.wait()


def waits_that_end_early(backend: GroupBackend) -> None:
    """A wait with a timeout bounds the wait, not the operation."""
    right, left = (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size
    output = torch.zeros(2)
    work = started(backend.recv(output, left, 31, async_op=True))
    try:
        work.wait(0.01)
    except DistTimeout:
        assert not work.is_completed(), "a wait that times out must not end the operation"
        assert work.exception() is None, "exception() is None while the operation runs"
    else:
        raise AssertionError("a wait for a message that nobody has sent returned")
    backend.barrier()
    sent = started(backend.send(torch.ones(2), right, 31, async_op=True))
    assert work.wait(60)
    same(output, torch.ones(2))
    sent.wait()


def threads(backend: GroupBackend) -> None:
    """Any thread may call: messages of several threads, and waits of one for another's work."""
    right, left = (backend.rank + 1) % backend.size, (backend.rank - 1) % backend.size

    def exchange(tag: int) -> list[int]:
        found = []
        for i in range(5):
            sent = started(backend.send(torch.tensor([tag + i]), right, tag, async_op=True))
            output = torch.zeros(1, dtype=torch.int64)
            backend.recv(output, left, tag)
            sent.wait()
            found.append(int(output))
        return found

    with ThreadPoolExecutor(3) as pool:
        for tag, future in [(tag, pool.submit(exchange, tag)) for tag in (100, 200, 300)]:
            assert future.result(60) == [tag + i for i in range(5)], f"messages of tag {tag}"
        tensor = torch.ones(3)
        work = started(backend.all_reduce(tensor, ReduceOp.SUM, async_op=True))
        for waiting in [pool.submit(work.wait) for _ in range(3)]:
            assert waiting.result(60)
        same(tensor, torch.full((3,), float(backend.size)))
        pool.submit(backend.all_reduce, tensor, ReduceOp.SUM).result(60)
        same(tensor, torch.full((3,), float(backend.size) ** 2))


def facts(backend: GroupBackend) -> None:
    """What a backend tells of itself and of the others has the form that the contract names."""
    assert backend.timeout > 0, "timeout is the group's default, in seconds"
    backend.note("about to meet")
    backend.barrier()
    notes = backend.notes()
    assert len(notes) == backend.size, "notes() has a text for each rank"
    assert notes[backend.rank] == "about to meet", "notes() has this rank's own"
    for rank in range(backend.size):
        said = backend.describe(rank)
        assert said == "" or said.startswith("rank"), f"describe({rank}) said {said!r}"
    for entry in backend.history():
        missing = {"kind", "sequence", "op", "state", "site", "posted_ns", "finished_ns"} - {*entry}
        assert not missing, f"an entry of history() lacks {sorted(missing)}"
    backend.barrier()  # nobody notes anything new before all have read
    backend.note("")


def dropped_works(backend: GroupBackend) -> None:
    """A work that nobody keeps is done all the same, before what is issued later."""
    tensor = torch.ones(10)
    backend.all_reduce(tensor, ReduceOp.SUM, async_op=True)
    backend.barrier()  # in order: it ends after the one before it
    same(tensor, torch.full((10,), float(backend.size)))


def coalesced(backend: GroupBackend) -> None:
    """Coalesced calls run in order, as one operation with one work."""
    size = backend.size
    for async_op in (False, True):
        a, b = torch.ones(3), torch.ones(4, dtype=torch.int64)
        output = torch.zeros(size, 3)
        last = inputs_of(backend, (3,), torch.float32, 1)
        calls = [
            ("all_reduce", (a, ReduceOp.SUM)),
            ("all_reduce", (b, ReduceOp.SUM)),
            ("all_gather_single", (output, torch.full((3,), 7.0))),
            ("all_gather_single", (output, last[backend.rank].clone())),
        ]
        work = backend.coalesce(calls, async_op=async_op)
        assert (work is not None) == async_op
        if work is not None:
            work.wait()
        same(a, torch.full((3,), float(size)))
        same(b, torch.full((4,), size))
        same(output, torch.stack(last))


def coalesced_calls_that_share_memory(backend: GroupBackend) -> None:
    """All coalesced calls read before any of them writes, also on one rank with overlaps alone."""
    size, rank = backend.size, backend.rank
    for async_op in (False, True):
        for part, shares in ((1, True), (5000, True), (1, rank == 0)):
            count, salt = 3 * part, 2 * part + async_op
            inputs = inputs_of(backend, (count,), torch.float32, salt)
            tensor = inputs[rank].clone()
            first, second = tensor[: 2 * part], tensor[part:]
            if not shares:
                second = second.clone()
            gathered = torch.full((size, count), -1.0)
            copies = torch.zeros(size, part)
            summands = inputs_of(backend, (size * part,), torch.float32, salt + 1)
            parts = summands[rank].clone()
            mine, again = parts[:part], torch.zeros(part)
            calls = [
                ("all_reduce", (first, ReduceOp.SUM)),
                ("all_reduce", (second, ReduceOp.SUM)),
                ("all_gather_single", (gathered, tensor if shares else inputs[rank])),
                ("all_gather_single", (copies, gathered.view(-1)[:part])),
                ("reduce_scatter_single", (mine, parts, ReduceOp.SUM)),
                ("reduce_scatter_single", (again, parts, ReduceOp.SUM)),
            ]
            before = backend.sequence_number()
            work = backend.coalesce(calls, async_op=async_op)
            if work is not None:
                outputs = [first, second, gathered, copies, mine, again]
                work.wait()
                assert [id(each) for each in work.result()] == [id(each) for each in outputs]
            assert backend.sequence_number() == before + len(calls), "a copy is no collective"
            case = (part, shares, async_op)
            is_reduction(backend, first, [each[: 2 * part] for each in inputs], ReduceOp.SUM, case)
            is_reduction(backend, second, [each[part:] for each in inputs], ReduceOp.SUM, case)
            same(gathered, torch.stack(inputs), case)
            same(copies, torch.full((size, part), -1.0), case)
            own = [each.view(size, part)[rank] for each in summands]
            is_reduction(backend, mine, own, ReduceOp.SUM, case)
            is_reduction(backend, again, own, ReduceOp.SUM, case)


def sequence_numbers(backend: GroupBackend) -> None:
    """Sequence_number counts the collectives of this rank."""
    before = backend.sequence_number()
    backend.barrier()
    backend.all_reduce(torch.ones(1), ReduceOp.SUM)
    assert backend.sequence_number() == before + 2


RULES: list[Rule] = [
    works,
    works_of_every_collective,
    order,
    waits_that_end_early,
    dropped_works,
    coalesced,
    coalesced_calls_that_share_memory,
    sequence_numbers,
    threads,
    facts,
]
