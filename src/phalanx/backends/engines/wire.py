"""What carries the bytes of an engine's messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from phalanx.backends.engines.frames import Frame
from phalanx.backends.engines.mailbox import Gate

Deliver = Callable[[int, Frame], None]
Lose = Callable[[int, str], None]
End = Callable[[str], None]


class Wire(ABC):
    """Carries frames, and payloads too large for one, between the ranks of one group.

    Frames of one rank arrive in the order they were sent, and are taken as they come: sending one
    never waits for the peer's program. A payload travels when the peer asks for it, by its number.
    ``deliver`` and ``lose`` may be called in any thread.
    """

    @abstractmethod
    def start(self, deliver: Deliver, lose: Lose) -> None:
        """Begin to take frames by ``deliver(source, frame)``; ``lose(peer, why)`` who is gone."""

    @abstractmethod
    def send(self, frame: Tensor, dst: int) -> None:
        """Send a frame, which is the wire's from now on.

        PeerFailed says why there is no peer, DistTimeout what the peer has failed to do.
        """

    @abstractmethod
    def number(self, dst: int) -> int:
        """Return the number, from 1, of the next payload for a peer; none on its way has it."""

    def foreseen(self, count: int, num_bytes: int) -> int:
        """Return the number of a payload that its receiver asks for before its frame has come.

        Both ends count these. No payload of another size has the number, so none can come in its
        place. 0: this wire has nothing of the kind, or not for so many bytes.
        """
        return 0

    @abstractmethod
    def offer(self, payload: Tensor, dst: int, number: int, end: End) -> None:
        """Hold a payload ready for a peer; ``end("")`` when it has been taken, or why not."""

    @abstractmethod
    def take(self, payload: Tensor, src: int, number: int, end: End) -> None:
        """Ask for a payload; ``end("")`` when it is here, or why it does not come."""

    def stall(self, gate: Gate, seconds: float) -> bool:
        """Wait for what the wire's work brings about; say whether it has come."""
        return gate.wait(seconds)

    def flush(self) -> None:  # noqa: B027
        """Give peers a moment to take the frames that were sent, as before the end of a process."""

    @abstractmethod
    def close(self) -> None:
        """Bring sent frames on their way, then end; what is still asked for is given up."""
