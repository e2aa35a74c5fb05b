"""The derived collectives, by the kit; and the kit itself, on backends that are wrong."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from phalanx.errors import DistBackendError, DistTimeout
from phalanx.testing import backend_kit
from phalanx.testing.backend_kit import check_backend, collectives, endings, messages, works
from phalanx.testing.memory import Exchange, MemoryBackend
from phalanx.types import ReduceOp
from phalanx.work import Work


def make(rank, size, shared, kind=MemoryBackend, timeout=30.0):
    return kind(shared.setdefault("exchange", Exchange(size)), rank, size, timeout)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_derived_collectives_keep_the_contract(size):
    check_backend(make, [size])


# Backends that are wrong, each with the rule that finds it out.

MUTANTS: list[tuple[backend_kit.Rule, type[MemoryBackend]]] = []


def breaks(*rules):
    def note(kind):
        MUTANTS.extend((rule, kind) for rule in rules)
        return kind

    return note


class Wrapped(Work):
    """A work that does what another does."""

    def __init__(self, work):
        self.inner = work

    def wait(self, timeout=None):
        return self.inner.wait(timeout)

    def is_completed(self):
        return self.inner.is_completed()

    def exception(self):
        return self.inner.exception()

    def result(self):
        return self.inner.result()

    def source_rank(self):
        return self.inner.source_rank()


@breaks(collectives.all_reduce)
class ForgetsToReduce(MemoryBackend):
    def all_reduce(self, tensor, op, squares=None, **options):
        return self.barrier(**options)


@breaks(collectives.all_reduce, collectives.all_reduce_of_the_same_bits)
class RoundsOnItsWay(MemoryBackend):
    """Is near enough for a backend that sums in any order, but not the same on all ranks."""

    def all_reduce(self, tensor, op, squares=None, **options):
        work = super().all_reduce(tensor, op, squares, **options)
        if self.rank == 1 and tensor.dtype == torch.float32:
            tensor.copy_(torch.nextafter(tensor, torch.full_like(tensor, 100.0)))
        return work


@breaks(collectives.all_reduce)
class FarOff(MemoryBackend):
    in_rank_order = False

    def all_reduce(self, tensor, op, squares=None, **options):
        work = super().all_reduce(tensor, op, squares, **options)
        if tensor.dtype == torch.float32:
            tensor.mul_(1.001)
        return work


@breaks(collectives.all_reduce)
class TakesAllOpsForSums(MemoryBackend):
    def all_reduce(self, tensor, op, squares=None, **options):
        known = op if tensor.dtype in ReduceOp.SUM.dtypes else ReduceOp.MAX
        known = ReduceOp.SUM if op == ReduceOp.AVG else known
        return super().all_reduce(tensor, known, squares, **options)


@breaks(collectives.all_reduce_of_every_shape)
class WorksOnACopy(MemoryBackend):
    def all_reduce(self, tensor, op, squares=None, **options):
        return super().all_reduce(tensor.contiguous(), op, squares, **options)


@breaks(collectives.all_reduce_of_many_elements)
class StopsEarly(MemoryBackend):
    def all_reduce(self, tensor, op, squares=None, **options):
        return super().all_reduce(tensor.view(-1)[:1000], op, squares, **options)


@breaks(collectives.all_reduce_of_special_values)
class HidesNan(MemoryBackend):
    def all_reduce(self, tensor, op, squares=None, **options):
        super().all_reduce(tensor, op, squares, **options)
        torch.nan_to_num_(tensor)


@breaks(collectives.all_reduce_with_squares)
class MeasuresTheInput(MemoryBackend):
    def all_reduce(self, tensor, op, squares=None, **options):
        before = tensor.abs().double().square().sum()
        super().all_reduce(tensor, op, squares, **options)
        if squares is not None:
            squares.fill_(before)


@breaks(collectives.all_reduce_of_a_leaf)
class NeedsPlainTensors(MemoryBackend):
    def all_reduce(self, tensor, op, squares=None, **options):
        return super().all_reduce(tensor.requires_grad_(False), op, squares, **options)


@breaks(collectives.broadcast)
class KnowsOneRoot(MemoryBackend):
    def broadcast(self, tensor, root, **options):
        return super().broadcast(tensor, 0, **options)


@breaks(collectives.reduce)
class ChangesOtherRanks(MemoryBackend):
    def reduce(self, tensor, root, op, **options):
        return self.all_reduce(tensor, op, **options)


@breaks(collectives.all_gather)
class ExpectsEqualShapes(MemoryBackend):
    def all_gather(self, outputs, input, **options):
        if any(each.shape != input.shape for each in outputs):
            raise DistBackendError("shapes differ")
        return super().all_gather(outputs, input, **options)


@breaks(collectives.all_gather_single)
class GathersBackwards(MemoryBackend):
    def all_gather_single(self, output, input, **options):
        super().all_gather_single(output, input, **options)
        output.copy_(output.flip(0))


@breaks(collectives.gather_and_scatter)
class ScattersOneOff(MemoryBackend):
    def scatter(self, output, inputs, root, **options):
        return super().scatter(output, inputs and inputs[::-1], root, **options)


@breaks(collectives.reduce_scatter, works.works_of_every_collective)
class ScattersNothing(MemoryBackend):
    def reduce_scatter(self, output, inputs, op, **options):
        return self.barrier(**options)


@breaks(collectives.reduce_scatter_into_inputs)
class WritesBeforeItHasReadAll(MemoryBackend):
    def reduce_scatter(self, output, inputs, op, *, timeout=None, async_op=False):
        return self._issue([output], timeout, async_op, self._reduce_scatter, output, inputs, op)


@breaks(collectives.reduce_scatter_single)
class CannotCutFlatInputs(MemoryBackend):
    def reduce_scatter_single(self, output, input, op, **options):
        rows = input.reshape(self.size, *output.shape) if input.dim() != output.dim() else input
        if rows.shape[0] != self.size:
            raise DistBackendError("the first dimension must be the number of ranks")
        return super().reduce_scatter_single(output, rows, op, **options)


@breaks(collectives.all_to_all)
class MixesUpDestinations(MemoryBackend):
    def all_to_all(self, outputs, inputs, **options):
        return super().all_to_all(outputs[::-1], inputs[::-1], **options)


@breaks(collectives.all_to_all_single_in_equal_parts)
class NeedsSplits(MemoryBackend):
    def all_to_all_single(self, output, input, output_splits, input_splits, **options):
        assert output_splits is not None
        return super().all_to_all_single(output, input, output_splits, input_splits, **options)


@breaks(collectives.inputs_are_kept)
class ReducesInItsInput(MemoryBackend):
    def reduce_scatter_single(self, output, input, op, **options):
        super().reduce_scatter_single(output, input, op, **options)
        input.view(self.size, -1)[self.rank].copy_(output.view(-1))


@breaks(collectives.gathering_in_place)
class ClearsOutputsFirst(MemoryBackend):
    def all_gather_single(self, output, input, **options):
        return super().all_gather_single(output.zero_(), input, **options)


@breaks(collectives.outputs_across_inputs)
class WritesWhileItReads(MemoryBackend):
    def all_gather(self, outputs, input, *, timeout=None, async_op=False):
        return self._issue(outputs, timeout, async_op, self._all_gather, outputs, input)


@breaks(collectives.barrier)
class OnlyWaits(MemoryBackend):
    def barrier(self, *, timeout=None, async_op=False):
        return super().barrier(timeout=timeout)


@breaks(works.works)
class LosesResults(MemoryBackend):
    class Empty(Wrapped):
        def result(self):
            return []

    def all_reduce(self, tensor, op, squares=None, **options):
        work = super().all_reduce(tensor, op, squares, **options)
        return work and self.Empty(work)


@breaks(works.works)
class HasSourcesForAll(MemoryBackend):
    class Sourced(Wrapped):
        def source_rank(self):
            return 0

    def all_reduce(self, tensor, op, squares=None, **options):
        work = super().all_reduce(tensor, op, squares, **options)
        return work and self.Sourced(work)


@breaks(works.works_of_every_collective)
class HasNoAsynchronousScatter(MemoryBackend):
    def scatter(self, output, inputs, root, *, timeout=None, async_op=False):
        return super().scatter(output, inputs, root, timeout=timeout)


@breaks(works.order, works.dropped_works)
class StartsWithTheWait(MemoryBackend):
    class Late(Wrapped):
        def __init__(self, call):
            self.call, self.done = call, False

        def wait(self, timeout=None):
            if not self.done:
                self.call()
            self.done = True
            return True

    def all_reduce(self, tensor, op, squares=None, *, timeout=None, async_op=False):
        call = partial(super().all_reduce, tensor, op, squares, timeout=timeout)
        return self.Late(call) if async_op else call()


@breaks(works.waits_that_end_early)
class GivesUpWithTheWait(MemoryBackend):
    class Impatient(Wrapped):
        def is_completed(self):
            return True

    def recv(self, *args, **options):
        got = super().recv(*args, **options)
        return self.Impatient(got) if isinstance(got, Work) else got


@breaks(works.coalesced)
class CoalescesBackwards(MemoryBackend):
    def coalesce(self, calls, **options):
        return super().coalesce(calls[::-1], **options)


@breaks(works.coalesced_calls_that_share_memory)
class ReadsWhatItHasWritten(MemoryBackend):
    def coalesce(self, calls, *, timeout=None, async_op=False):
        return self._run_batch(calls, timeout, async_op)


@breaks(works.sequence_numbers)
class DoesNotCount(MemoryBackend):
    def sequence_number(self):
        return 0


@breaks(works.threads)
class BelongsToOneThread(MemoryBackend):
    def __init__(self, *args):
        super().__init__(*args)
        self.owner = threading.get_ident()

    def send(self, tensor, dst, tag=0, **options):
        if tag > 0 and threading.get_ident() != self.owner:
            raise RuntimeError("this backend belongs to another thread")
        return super().send(tensor, dst, tag, **options)


@breaks(works.facts)
class ForgetsItsNote(MemoryBackend):
    def notes(self):
        return [""] * self.size


@breaks(messages.messages)
class SendsMemoryAsItLies(MemoryBackend):
    def send(self, tensor, dst, tag=0, **options):
        if not tensor.is_contiguous():
            base = tensor.as_strided((tensor.numel(),), (1,)).reshape(tensor.shape)
            return super().send(base, dst, tag, **options)
        return super().send(tensor, dst, tag, **options)


@breaks(messages.large_messages)
class CutsMessages(MemoryBackend):
    def send(self, tensor, dst, tag=0, **options):
        tensor = tensor.clone()
        tensor.view(-1)[200_000:].zero_()
        return super().send(tensor, dst, tag, **options)


@breaks(messages.blocking_messages)
class SendsZeros(MemoryBackend):
    def send(self, tensor, dst, tag=0, *, timeout=None, async_op=False):
        sent = tensor if async_op or tag else torch.zeros_like(tensor)
        return super().send(sent, dst, tag, timeout=timeout, async_op=async_op)


@breaks(messages.messages_to_oneself)
class RefusesItself(MemoryBackend):
    def send(self, tensor, dst, tag=0, **options):
        if dst == self.rank:
            raise DistBackendError("a rank cannot send to itself")
        return super().send(tensor, dst, tag, **options)


@breaks(messages.order_of_sizes)
class LetsSmallOnesPass(MemoryBackend):
    def send(self, tensor, dst, tag=0, **options):
        with self._exchange.changed:
            sent = super().send(tensor, dst, tag, **options)
            if tensor.numel() < 1000:
                self._exchange.messages.insert(0, self._exchange.messages.pop())
        return sent


@breaks(messages.many_messages)
class HasAFewCells(MemoryBackend):
    def send(self, tensor, dst, tag=0, **options):
        with self._exchange.changed:
            waiting = sum(message[:2] == (self.rank, dst) for message in self._exchange.messages)
            if waiting > 16:
                raise DistBackendError("the mailbox is full")
            return super().send(tensor, dst, tag, **options)


@breaks(messages.messages_are_kept)
class MovesInsteadOfCopying(MemoryBackend):
    def send(self, tensor, dst, tag=0, **options):
        sent = super().send(tensor, dst, tag, **options)
        tensor.detach().zero_()
        return sent


@breaks(messages.tags)
class MixesTags(MemoryBackend):
    def send(self, tensor, dst, tag=0, **options):
        return super().send(tensor, dst, min(tag, 0), **options)

    def recv(self, tensor, src, tag=0, **options):
        return super().recv(tensor, src, min(tag, 0), **options)


@breaks(messages.negative_tags)
class ForgetsSigns(MemoryBackend):
    def send(self, tensor, dst, tag=0, **options):
        return super().send(tensor, dst, abs(tag), **options)

    def recv(self, tensor, src, tag=0, **options):
        return super().recv(tensor, src, abs(tag), **options)


@breaks(messages.any_source)
class GuessesTheSource(MemoryBackend):
    def recv(self, tensor, src, tag=0, **options):
        got = super().recv(tensor, src, tag, **options)
        return 0 if src is None and isinstance(got, int) else got


@breaks(messages.timeouts, endings.late_collectives)
class HasAnotherTimeout(MemoryBackend):
    def recv(self, tensor, src, tag=0, **options):
        try:
            return super().recv(tensor, src, tag, **options)
        except DistTimeout as error:
            raise DistBackendError("it took too long") from error


@breaks(endings.late_collectives)
class ScattersInTheGroupsTime(MemoryBackend):
    def scatter(self, output, inputs, root, *, timeout=None, async_op=False):
        return super().scatter(output, inputs, root, async_op=async_op)


@breaks(endings.late_works)
class StartsInTheGroupsTime(MemoryBackend):
    def _issue(self, outputs, timeout, async_op, step, *args):
        return super()._issue(outputs, None if async_op else timeout, async_op, step, *args)


@breaks(endings.late_in_the_groups_time)
class CoalescesInTheFirstTime(MemoryBackend):
    def coalesce(self, calls, *, async_op=False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "timeout", 1.0)
            return super().coalesce(calls, async_op=async_op)


@breaks(endings.missing_ranks)
class MonitorsNothing(MemoryBackend):
    def monitored_barrier(self, *, timeout=None, wait_all_ranks=False):
        pass


@breaks(endings.closing)
class LeavesWorksAlone(MemoryBackend):
    def close(self):
        pass


@breaks(endings.aborting, endings.failing)
class GivesNoReason(MemoryBackend):
    def abort(self, reason):
        super().abort("aborted")


@breaks(endings.aborting)
class IgnoresAborts(MemoryBackend):
    def abort(self, reason):
        self.send(torch.zeros(1), 1, 9)


@pytest.mark.parametrize(("rule", "kind"), MUTANTS, ids=lambda each: each.__name__)
def test_the_kit_notices(rule, kind):
    team = backend_kit._Team(partial(make, kind=kind, timeout=1.0), 2)
    with pytest.raises(AssertionError) as caught:
        team.check(partial(backend_kit._check, rule), 20)
    text = str(caught.value)
    assert text.startswith(f"{rule.__name__}, rank ")
    assert "broke the rule: " + rule.__doc__.split("\n")[0] in text
    assert "found by line " in text


def test_every_rule_can_be_broken():
    rules = {*backend_kit.RULES, *endings.RULES}
    assert {rule for rule, _ in MUTANTS} == rules
    assert all(rule.__doc__ for rule in rules)


def test_a_backend_that_hangs_is_told_where():
    class Hangs(MemoryBackend):
        def all_reduce(self, tensor, op, squares=None, **options):
            self.recv(torch.zeros(1), 0, 99)

    with pytest.raises(AssertionError, match=r"after 0.2 s[\s\S]*rank1[\s\S]*self.recv") as caught:
        check_backend(partial(make, kind=Hangs), [2], timeout=0.2)
    assert "rank1, in the rule all_reduce: " + collectives.all_reduce.__doc__ in str(caught.value)


def test_a_kit_without_sizes_or_backends_is_refused():
    with pytest.raises(ValueError, match="sizes"):
        check_backend(make, ())
    with pytest.raises(TypeError, match="got None"):
        check_backend(lambda rank, size, shared: None, [1])


def test_a_backend_that_exits_is_told_with_the_rule():
    class Exits(MemoryBackend):
        def all_reduce(self, tensor, op, squares=None, **options):
            raise SystemExit(3)

    with pytest.raises(AssertionError, match=r"^all_reduce, rank 0 of 1, broke the rule"):
        check_backend(partial(make, kind=Exits), [1])


def test_a_backend_that_mistakes_itself_is_told_so():
    with pytest.raises(AssertionError, match="rank 1 of 2 says that it is rank 0 of 2"):
        check_backend(lambda rank, size, shared: make(0, size, shared), [2])
