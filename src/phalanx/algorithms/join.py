"""Training with uneven inputs: ranks that have run out of data go along with those that have not.

Every iteration begins with an exchange in which each rank says whether it still has input. A rank
that has none *shadows*, through the hooks of the joinables, the collectives that the others make.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.collectives import all_reduce
from phalanx.errors import CollectiveMismatch, Deadlock
from phalanx.groups import ProcessGroup
from phalanx.work import JoinedWork, Work
from phalanx.world import resolve

__all__ = ["Join", "JoinHook", "Joinable"]

_SKEW = 1000  # iterations that a rank shadows before it warns

# The exchange must match nothing but itself: a collective of the program that met it would let
# wrong numbers pass. Nobody reduces eleven integers of 32 bits (which fit into a cache line).
_ELEMENTS, _DTYPE = 11, torch.int32

_ADVICE = (
    "a rank that has left its loop shadows, under Join, the calls of the joinables and no others: "
    "a collective that is made in the loop or in the model besides them has no partner there. "
    "Move it behind the loop, put it into a Joinable whose join hook shadows it, or stop all ranks "
    "with the first (throw_on_early_termination=True). Of the joinables, the one that communicates "
    "first in an iteration must be the first in the list"
)


class JoinHook:
    """What a rank without input does for one joinable. Override one method or both."""

    num_active = 0  # ranks that have input; up to date whenever main_hook is called

    def main_hook(self) -> None:
        """Shadow the collectives of one iteration: forward, backward and optimizer step.

        Called once for each iteration that some rank still makes.
        """

    def post_hook(self, is_last_joiner: bool) -> None:
        """Finish, when all ranks have joined.

        ``is_last_joiner`` says that this rank made the most iterations (it may share that).
        """


class _JoinConfig(NamedTuple):
    """How a joinable takes part in the join context that it is in."""

    enable: bool
    throw_on_early_termination: bool
    is_first_joinable: bool

    @staticmethod
    def construct_disabled_join_config() -> _JoinConfig:
        """Return the config of a joinable outside of any context."""
        return _JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)


class Joinable(ABC):
    """Something that communicates in every iteration and can do so for a rank without input.

    It calls ``Join.notify_join_context(self)`` before its own first collective of an iteration,
    and its constructor calls ``Joinable.__init__``.
    """

    @abstractmethod
    def __init__(self) -> None:
        super().__init__()
        self._join_config = _JoinConfig.construct_disabled_join_config()
        self._has_joined = False  # whether this rank has left its loop and others have not

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for one join context; ``kwargs`` are those that ``Join`` was given."""

    @property
    @abstractmethod
    def join_device(self) -> torch.device:
        """The device of the tensors that are communicated."""

    @property
    @abstractmethod
    def join_process_group(self) -> ProcessGroup | None:
        """The group that is communicated on."""


class Join:
    """Let the ranks of a group leave a training loop at different iterations.

    ``with Join([model, optimizer]): loop`` returns on all ranks together. A rank that leaves its
    loop early runs the main hooks of ``joinables``, in the order given, for each iteration that
    another rank makes, and then, with all ranks, the post hooks. All ranks pass the same joinables
    in the same order, all on one group; the first of them must communicate in every iteration.

    Args:
        joinables: Who takes part.
        enable: False makes the context do nothing, where inputs are known to be even.
        throw_on_early_termination: Raise RuntimeError on all ranks, in the same iteration, when
            the first of them runs out of input, instead of going on without it.
        kwargs: Passed to the ``join_hook`` of each joinable.
    """

    def __init__(
        self,
        joinables: Sequence[Joinable],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if len(joinables) == 0:
            raise ValueError("The join context manager requires at least one joinable")
        self._joinables = list(joinables)
        for joinable in self._joinables:
            _check_constructed(joinable)
        self._enable = enable
        self._throw_on_early_termination = throw_on_early_termination
        self._process_group = _common_group(self._joinables)
        self._join_hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]

    def __enter__(self) -> Join:
        for i, joinable in enumerate(self._joinables):
            joinable._join_config = _JoinConfig(
                enable=self._enable,
                throw_on_early_termination=self._throw_on_early_termination,
                is_first_joinable=i == 0,
            )
        return self

    # Not called __exit__ here, since reports name the function that a line has called.
    def join(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shadow the ranks that still have input, until none has, and run the post hooks.

        An exception from the block goes on to the caller, and nothing is run.
        """
        try:
            if error is not None:
                _explain(error)
            elif self._enable:
                self._shadow()
        except (CollectiveMismatch, Deadlock) as own_error:
            _explain(own_error)
            raise
        finally:
            disabled = _JoinConfig.construct_disabled_join_config()
            for joinable in self._joinables:
                joinable._join_config = disabled
                joinable._has_joined = False

    __exit__ = join

    def _shadow(self) -> None:
        group = self._process_group
        rank, num_shadowed = group.to_global_rank(group.rank()), 0
        for joinable in self._joinables:
            joinable._has_joined = True
        while True:
            count = _vote(active=False)
            all_reduce(count, group=group)
            num_active = int(count[0])
            if num_active == 0:
                break
            if self._throw_on_early_termination:
                raise RuntimeError(
                    f"Rank {rank} exhausted all inputs. Other ranks had some "
                    "left; all stop here (throw_on_early_termination)"
                )
            for hook in self._join_hooks:
                hook.num_active = num_active
                hook.main_hook()
            num_shadowed += 1
            if num_shadowed == _SKEW + 1:
                warnings.warn(
                    f"Detected uneven input skew of greater than {_SKEW}: rank {rank} has no "
                    "input and has shadowed that many iterations of other ranks. Distribute the "
                    "inputs more evenly",
                    stacklevel=3,
                )
        for hook in self._join_hooks:
            hook.post_hook(num_shadowed == 0)

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Work | None:
        """Tell the ranks that have joined that this one makes another iteration.

        A joinable calls this before its own collectives of an iteration. For the first joinable of
        an enabled context, returns a work whose result is one tensor with one element, the number
        of ranks that still have input; for others, does nothing and returns None.

        Raises RuntimeError if the context has ``throw_on_early_termination`` and a rank has joined.
        """
        _check_constructed(joinable)
        config = joinable._join_config
        # A hook of a rank that has joined may go through the joinable's own step.
        if not config.enable or not config.is_first_joinable or joinable._has_joined:
            return None
        group = resolve(joinable.join_process_group)
        count = _vote(active=True)
        work = all_reduce(count, group=group, async_op=True)
        assert work is not None
        if config.throw_on_early_termination:
            work.wait()
            if (num_active := int(count[0])) < group.size():
                raise RuntimeError(
                    "Detected at least one rank that exhausted inputs. Throwing across all ranks. "
                    f"{num_active} of {group.size()} had some left"
                )
        return JoinedWork([work], [count[:1]])


def _vote(active: bool) -> Tensor:
    """Return what a rank brings to the exchange: summed, each element counts the active ranks."""
    return torch.full((_ELEMENTS,), int(active), dtype=_DTYPE)


def _check_constructed(joinable: Joinable) -> None:
    if not hasattr(joinable, "_join_config"):
        raise AssertionError(
            f"{type(joinable).__name__} is not yet a Joinable: its constructor must call "
            "Joinable.__init__(self)"
        )


def _common_group(joinables: Sequence[Joinable]) -> ProcessGroup:
    group = resolve(joinables[0].join_process_group)
    for i, joinable in enumerate(joinables):
        other = resolve(joinable.join_process_group)
        if other is not group:
            raise ValueError(
                "Using join context manager with multiple process groups: joinable 0 "
                f"({type(joinables[0]).__name__}) is on {group.group_name!r}, joinable {i} "
                f"({type(joinable).__name__}) on {other.group_name!r}"
            )
    return group


def _explain(error: BaseException) -> None:
    """Say of calls that did not fit together what Join has to do with them."""
    text = str(error)
    has_joined = f" for {Join.join.__name__} " in text
    if isinstance(error, CollectiveMismatch | Deadlock) and has_joined and _ADVICE not in text:
        error.args = (f"{text}\n{_ADVICE}",)
