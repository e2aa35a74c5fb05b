"""Reducing gradients while backward computes further ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Variable, profiler
from torch.autograd.profiler import record_function
from torch.futures import Future

from phalanx._native import copy_all
from phalanx.groups import ProcessGroup
from phalanx.parallel.buckets import (
    Bucket,
    BucketCapacityConfig,
    GradBucket,
    Slot,
    compute_bucket_assignment_by_size,
)
from phalanx.parallel.events import Departure, End, arrival
from phalanx.parallel.exchange import Exchange, zero_bucket
from phalanx.parallel.health import GradientHealth
from phalanx.parallel.ownership import is_held, share
from phalanx.parallel.precision import LowPrecision
from phalanx.parallel.statistics import Statistics
from phalanx.parallel.unused import Usage
from phalanx.world import active

_nothing = nullcontext()


class Reducer:
    """The gradients of one model, in buckets that are reduced in one order on all ranks.

    A forward pass arms it. Backward begins when a gradient reaches one of the module's outputs,
    or a parameter. Each parameter's gradient, once accumulated, counts as ready; the bucket whose
    gradients are all ready, and which is next in order, is reduced by the group's own thread while
    backward goes on. At the end of backward the rest is reduced, and all is waited for. From then
    on the gradients are pieces of the buckets.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        group: ProcessGroup,
        caps: BucketCapacityConfig,
        *,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        skip_unused: bool = False,
        low: LowPrecision | None = None,
        reduce_dtype: torch.dtype | None = None,
        statistics: Statistics,
    ) -> None:
        self.slots = list(slots)
        self.exchange = Exchange(group)
        self.caps = caps
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.statistics = statistics
        self.usage = Usage(self.slots, statistics)
        self.rebuilt = False
        self.num_iterations = 0
        self.skip_unused = skip_unused
        # In mixed precision gradients are reduced in a type of their own.
        self.low = low
        self.dtype = reduce_dtype
        self.after_backward: list[Callable[[], None]] = []  # run once, when the next one is done
        self.on_finish: Callable[[], None] | None = None  # run whenever one is done
        self.joining = False  # whether ranks may have run out of input
        self.late = False  # whether unused parameters are an error only in the next forward pass
        limits, _ = caps.compute_bucket_size_limits(static_graph, find_unused_parameters)
        tensors = [slot.param for slot in self.slots]
        sparse = [slot.sparse for slot in self.slots]
        indices, _ = compute_bucket_assignment_by_size(tensors, limits, sparse)
        # Parameters are mostly used in the order in which they are defined.
        self._build(list(reversed(indices)))
        self._armed = False
        self.running = False  # whether a backward pass is being reduced
        self._lost = False  # whether an exception has left a pass, which others may wait for
        self._carries = False  # whether there are gradients of passes that were not reduced
        self._open: set[Departure] = set()  # from outputs that may still get a gradient
        self._reset()
        self._handles: list[Any] = [
            slot.param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                arrival(weakref.ref(self), slot)
            )
            for slot in self.slots
        ]
        share(self.slots)
        weakref.finalize(self, _remove, self._handles)

    def _build(self, indices: Sequence[Sequence[int]]) -> None:
        self.buckets = [
            Bucket(
                i, [self.slots[j] for j in chosen], self.dtype or self.slots[chosen[0]].param.dtype
            )
            for i, chosen in enumerate(indices)
        ]
        self.statistics.buckets(self.buckets, self.rebuilt)

    def _reset(self) -> None:
        """Expect every gradient again."""
        for bucket in self.buckets:
            bucket.pending = bucket.expected
            bucket.loose.clear()
        for slot in self.slots:
            slot.left = slot.due
        self.arrived: list[Slot] = []
        self._kept: list[Slot] = []  # whose gradients stay where they are, and get the result
        self._next = 0  # the bucket to be reduced next
        self.exchange.reset()

    @property
    def group(self) -> ProcessGroup:
        """The ranks that train together."""
        return self.exchange.group

    @property
    def health(self) -> GradientHealth | None:
        """What watches the gradients, if anything."""
        return self.exchange.health

    @property
    def learning(self) -> bool:
        """Whether this is the first pass of a graph that is said to stay the same."""
        return self.static_graph and not self.usage.passes

    # Forward

    def arm(self, outputs: Sequence[Tensor]) -> None:
        """Expect a backward pass from these outputs of the module."""
        self._armed = True
        for output in outputs:
            if output.grad_fn is not None:
                departure = Departure(weakref.ref(self))
                self._open.add(departure)
                output.register_hook(departure)  # type: ignore[no-untyped-call]

    def prepare_for_forward(self) -> None:
        """Begin an iteration; raise if the one before has left gradients out."""
        self.num_iterations += 1
        self.check_finished()
        self._open.clear()

    def check_finished(self) -> None:
        """Raise on all ranks if gradients of the last backward pass are missing."""
        if self._lost:
            self._make_up()
        elif self.arrived and not self.running:
            self._finish()

    def _make_up(self) -> None:
        """Give the other ranks what a pass that was left by an exception owes them.

        They learn of it, and raise. Of this rank's gradients nothing is left of that pass.
        """
        self._lost = False
        if self.late and self.static_graph:
            self._finish()
            return
        try:
            self.exchange.make_up(self.buckets[self._next :], len(self.buckets))
            self.usage.settle(self.group, (), find_unused=True, static_graph=False, abandoned=True)
        finally:
            for slot in self.slots:
                if slot.param.grad is slot.view or slot.left < slot.due:
                    slot.param.grad = None
            self._reset()

    def rebuild_buckets(self) -> bool:
        """Build buckets in the order in which gradients arrived on the first rank, once."""
        if self.rebuilt or not self.usage.passes or self.caps.has_custom_per_bucket_caps:
            return False
        if self.find_unused_parameters and not self.static_graph:
            return False  # the order may change with every pass
        order = torch.tensor(self.usage.order, dtype=torch.int64)
        active(self.group).broadcast(order, 0)
        self.rebuilt = True
        indices, _ = compute_bucket_assignment_by_size(
            [self.slots[i].param for i in order.tolist()],
            self.caps.limits(),
            [slot.sparse for slot in self.slots],
            order.tolist(),
        )
        self._build(indices)
        self._reset()
        return True

    # Backward

    def on_output(self, departure: Departure) -> None:
        """A gradient has reached an output of the module."""
        self._open.discard(departure)
        if not self.running:
            self._begin()

    def on_stray(self, slot: Slot) -> bool:
        """A gradient has come outside of a running pass: say whether that begins one."""
        if self._armed:
            self._begin()
        else:
            slot.carried = self._carries = True
        return self._armed

    def on_repeat(self, slot: Slot) -> None:
        """A gradient has come that will come again, or should not have come again."""
        if slot.left < 0 and not self.learning:
            self.usage.raise_again(slot, self.static_graph)

    def on_accumulated(self, slot: Slot) -> None:
        """A gradient has accumulated in its bucket, where nothing is copied."""
        if self.health is not None:
            self.health.measure_in_place(slot)

    def move_in(self, slot: Slot, grad: Tensor) -> None:
        """Copy a gradient into its bucket at once.

        A large one, while it is in the cache, and one that somebody else has to do with: that one
        stays where it is, and gets the result in the end.
        """
        if self.low is not None or slot.sparse:
            return
        slot.check(grad)
        squares = copy_all([slot.view], [grad], self.health is not None)
        if self.health is not None:
            self.health.measured([slot], squares)
        if grad.requires_grad or slot.stays:
            self._kept.append(slot)
        else:
            slot.param.grad = slot.view

    def _begin(self) -> None:
        if self._lost:
            self._make_up()
        self.running = True
        if not self.arrived:
            self.statistics.backward_begins()
            if self.health is not None:
                self.health.begin()
            self._renew_held()
            for slot in self.slots:
                param = slot.param
                is_other = param.grad is not None and param.grad is not slot.view
                slot.stays = not slot.sparse and (slot.is_shared or (is_other and is_held(param)))
                slot.at_once = slot.is_large or slot.stays
                hooks: Any = slot.param._post_accumulate_grad_hooks
                if len(hooks) > 1:  # ours comes last, so that it sees what the others make of it
                    key = self._handles[slot.index].id
                    hooks[key] = hooks.pop(key)
                if not slot.due:
                    self._contribute(slot)
        Variable._execution_engine.queue_callback(End(weakref.ref(self)))

    def _renew_held(self) -> None:
        """Leave alone the gradients of the last step that have been kept for something."""
        if not self.gradient_as_bucket_view:
            for bucket in self.buckets:
                if not bucket.sparse and bucket.is_held():
                    bucket.renew()

    def launch_ready(self) -> None:
        """Reduce all buckets whose turn it is, but the last: nothing is left to overlap it with."""
        if self.learning:
            return
        last = len(self.buckets) - 1
        while self._next < last and not self.buckets[self._next].pending:
            self._launch(self.buckets[self._next], async_op=True)

    def _launch(self, bucket: Bucket, async_op: bool) -> None:
        self.statistics.communication_begins()
        if not bucket.sparse:
            self._settle(bucket)
        self.exchange.launch(bucket, len(self.buckets), async_op)
        self._next += 1  # not if that has raised: then the others still wait for it

    def _settle(self, bucket: Bucket) -> None:
        """Bring all gradients of a bucket into it."""
        if self.low is None:
            measured = None if self.health is None else self.health.measured
            self._kept += bucket.settle(torch.is_grad_enabled(), measured)
            return
        with torch.no_grad():
            for slot in bucket.slots:
                if slot.left < slot.due:
                    slot.view.copy_(cast(Tensor, slot.param.grad))
                    self.on_accumulated(slot)
        bucket.loose.clear()

    # The end of backward

    def on_end(self) -> None:
        """Backward has visited everything."""
        if not self.running:
            return
        self.running = False
        if (
            len(self.arrived) < len(self.slots)
            and not (self.find_unused_parameters or self.learning)
            and (self.late or self._open)
            and any(slot.left > 0 for slot in self.slots if slot.param.requires_grad)
        ):
            return  # another backward pass may bring them; the next forward pass looks again
        self._finish()

    def on_lost(self) -> None:
        """An exception has left backward."""
        if self.running:
            self.running = self._armed = False
            self._lost = True
            self.exchange.abandon()
            if self.low is not None:
                self.low.restore(failed=True)

    def _finish(self, shadowing: bool = False) -> None:
        """Reduce what has not been reduced, and hand out the gradients."""
        self._armed = False
        learning = self.learning
        self.statistics.computation_ends()
        absent = []
        if len(self.arrived) < len(self.slots):
            absent = [slot for slot in self.slots if slot.left == slot.due]
            for slot in absent:
                if slot.due or shadowing:
                    self._contribute(slot)
            for slot in self.slots:
                if 0 < slot.left < slot.due and slot.param.grad is not slot.view:
                    slot.bucket.loose.append(slot)
        try:
            self._launch_rest(shadowing)
            self.exchange.wait()
        except BaseException:
            if self.low is not None:
                self.low.restore(failed=True)
            # The other ranks may have seen no error, and wait for the end of this pass.
            self._lost = True
            self.exchange.abandon()
            raise
        self.statistics.communication_ends()
        try:
            with record_function("search_unused_parameters") if self._is_profiled() else _nothing:
                self.usage.settle(
                    self.group,
                    self.arrived,
                    find_unused=self.find_unused_parameters or shadowing,
                    static_graph=self.static_graph and not shadowing,
                    joining=self.joining,
                )
            self._hand_out(absent)
            if learning:
                for bucket in self.buckets:
                    bucket.expected = sum(slot.due > 0 for slot in bucket.slots)
        finally:
            if self.low is not None:
                self.low.restore()
            unused = sum(slot.param.numel() * slot.param.element_size() for slot in absent)
            self.statistics.pass_ends(self.usage, self.exchange.num_launched, unused)
            if self._carries:
                self._carries = False
                for slot in self.slots:
                    slot.carried = False
            self._reset()
        if self.on_finish is not None:
            self.on_finish()
        callbacks, self.after_backward = self.after_backward, []
        for callback in callbacks:
            callback()
        if self.health is not None:
            self.health.settle(self.group)

    def _launch_rest(self, shadowing: bool) -> None:
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            unused_here = not any(slot.used for slot in bucket.slots)
            if self.skip_unused and unused_here and not shadowing:
                self._next += 1
                continue
            self._launch(bucket, async_op=self._next < len(self.buckets) - 1)

    def _is_profiled(self) -> bool:
        return self.find_unused_parameters and profiler._is_profiler_enabled

    def _contribute(self, slot: Slot) -> None:
        """Take part with what a parameter that was not used has: an earlier gradient, or zeros."""
        if slot.bucket.sparse:
            return
        grad = slot.param.grad
        if grad is None:
            slot.view.zero_()
        elif grad is slot.view:
            # The reduction writes here, but nobody must notice if no rank has used it.
            slot.param.grad = grad.clone()
        else:
            slot.view.copy_(grad)

    def _hand_out(self, absent: Sequence[Slot]) -> None:
        """Make the pieces of the buckets the gradients, but of parameters that no rank used."""
        for slot in self._kept:
            cast(Tensor, slot.param.grad).data.copy_(slot.view)
        for bucket in self.buckets:
            if bucket.sparse and self.usage.used_anywhere(slot := bucket.slots[0]):
                slot.param.grad = slot.view if self.low is None else None
        if self.low is not None:
            self.low.restore()
        for slot in absent if self.low is None else self.slots:
            if not self.usage.used_anywhere(slot):
                continue
            grad = slot.param.grad
            if self.low is not None or slot.stays:
                result = slot.view.to(slot.param.dtype)
                slot.param.grad = result.clone() if grad is None else grad.copy_(result)
            else:
                slot.param.grad = slot.view

    # For others

    def set_gradients_aside(self) -> list[Tensor | None]:
        """Return the gradients of all parameters, such that no later reduction changes them."""
        is_written = self.gradient_as_bucket_view
        grads = [(slot, slot.param.grad) for slot in self.slots]
        return [g.clone() if g is s.view and is_written else g for s, g in grads]

    def shadow_backward(self) -> None:
        """Take part in a backward pass of the other ranks without gradients of one's own.

        Afterwards this rank has the same gradients as they have.
        """
        for slot in self.slots:
            slot.param.grad = None
        if self.health is not None:
            self.health.begin()
        self._renew_held()
        self._finish(shadowing=True)

    def change_group(self, group: ProcessGroup) -> None:
        """Go on with the ranks of another group, as if from the beginning."""
        self.exchange.group = group
        self.usage = Usage(self.slots, self.statistics)
        self.rebuilt = self.running = self._armed = self._lost = False
        self._reset()

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        return [zero_bucket(bucket, len(self.buckets)) for bucket in self.buckets]

    def _get_local_used_map(self) -> Tensor:
        return self.usage.local_map()

    def _ddp_graph_static(self) -> bool:
        return self.usage.always_same

    def _rebuild_buckets(self) -> bool:
        return self.rebuild_buckets()

    def _run_comm_hook(self, bucket: GradBucket) -> Future[Any]:
        exchange = self.exchange
        return exchange.average(bucket) if exchange.hook is None else exchange.run_hook(bucket)

    def _run_allreduce_hook(self, bucket: GradBucket) -> Future[Any]:
        return self.exchange.average(bucket)

    def remove_hooks(self) -> None:
        """Let go of the parameters."""
        _remove(self._handles)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
