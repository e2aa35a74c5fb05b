"""Tensors on their way between two hosts, each with the announcement of what it belongs to.

The announcement goes ahead in a frame of fixed size, and the tensor follows at once, in the frame
itself if it is small: so a rank that brings something else is found out without a round trip, and
before anything is taken in.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple, cast

import torch
from torch import Tensor

from phalanx.backends.base import GroupBackend
from phalanx.backends.hierarchy.vigil import Vigil
from phalanx.errors import CollectiveMismatch
from phalanx.types import Deadline
from phalanx.work import Work

_FRAME = 768
_HEAD = struct.Struct("<QQQHH")  # sequence, digest, bytes of the tensor, lengths of the two texts
_TEXT = 160  # bytes of each text at most
_INLINE = _FRAME - _HEAD.size - 2 * _TEXT  # bytes of a tensor that travels in the frame


class Announcement(NamedTuple):
    """One collective, as a rank asks for it."""

    sequence: int
    what: str  # "all_reduce(float32[1024], SUM)"
    site: str  # "train.py:88 in step"
    digest: int  # equal if the operations fit together

    @classmethod
    def of(cls, sequence: int, what: str, site: str, *agreed: object) -> Announcement:
        """Make one; ``agreed`` is what must be the same on all ranks."""
        text = repr(agreed).encode()
        return cls(sequence, what, site, zlib.crc32(text) << 32 | zlib.adler32(text) | 1)


class Wire:
    """One rank's way to the ranks of other hosts, for collectives."""

    def __init__(self, engine: GroupBackend, tag: int, vigil: Vigil) -> None:
        self._engine = engine
        self._vigil = vigil
        self._tag = tag

    def announce(self, peer: int, announcement: Announcement, tensor: Tensor) -> Sending:
        """Begin to send a tensor, flat and contiguous, with its announcement."""
        data = _bytes(tensor)
        frame = bytearray(_FRAME)
        texts = [text.encode()[:_TEXT] for text in (announcement.what, announcement.site)]
        _HEAD.pack_into(
            frame,
            0,
            announcement.sequence,
            announcement.digest,
            data.numel(),
            len(texts[0]),
            len(texts[1]),
        )
        start = _HEAD.size
        for text in texts:
            frame[start : start + len(text)] = text
            start += _TEXT
        if data.numel() <= _INLINE:
            frame[start : start + data.numel()] = data.numpy().tobytes()
        pieces = [torch.frombuffer(frame, dtype=torch.uint8)]
        if data.numel() > _INLINE:
            pieces.append(data)
        return self._send(pieces, peer)

    def accept(
        self, peer: int, announcement: Announcement, tensor: Tensor, deadline: Deadline
    ) -> Coming:
        """Begin to receive a tensor; CollectiveMismatch if its announcement is another one."""
        frame = torch.empty(_FRAME, dtype=torch.uint8)
        self.start_receiving(peer, frame).wait(deadline, announcement.what)
        raw = frame.numpy().tobytes()
        sequence, digest, length, what, site = _HEAD.unpack_from(raw)
        data = _bytes(tensor)
        if digest != announcement.digest or length != data.numel():
            texts = raw[_HEAD.size :]
            theirs = texts[:what].decode(errors="replace")
            there = texts[_TEXT : _TEXT + site].decode(errors="replace")
            raise Differing(Announcement(sequence, theirs, there, digest), peer)
        if length <= _INLINE:
            start = _HEAD.size + 2 * _TEXT
            data.copy_(frame[start : start + length])
            return Coming(None, self._vigil, peer)
        return self.start_receiving(peer, data)

    def start_sending(self, peer: int, tensor: Tensor) -> Sending:
        """Begin to send a tensor that needs no announcement."""
        return self._send([_bytes(tensor)], peer)

    def start_receiving(self, peer: int, tensor: Tensor) -> Coming:
        """Begin to receive a tensor that needs no announcement."""
        work = cast(Work, self._engine.recv(_bytes(tensor), peer, self._tag, async_op=True))
        return Coming(work, self._vigil, peer)

    def _send(self, pieces: list[Tensor], peer: int) -> Sending:
        works = [self._engine.send(data, peer, self._tag, async_op=True) for data in pieces]
        return Sending([work for work in works if work is not None], pieces, self._vigil, peer)


class Sending:
    """What is being sent: it must not change before it has left."""

    def __init__(self, works: list[Work], pieces: list[Tensor], vigil: Vigil, peer: int) -> None:
        self._works = works
        self._pieces = pieces  # alive as long
        self._vigil = vigil
        self._peer = peer

    def wait(self, deadline: Deadline) -> None:
        """Wait until it has left."""
        for work in self._works:
            self._vigil.wait(work, deadline, [self._peer])


class Coming:
    """What is being received."""

    def __init__(self, work: Work | None, vigil: Vigil, peer: int) -> None:
        self._work = work
        self._vigil = vigil
        self._peer = peer

    def wait(self, deadline: Deadline, doing: str = "") -> None:
        """Wait until it is there; see `Vigil.wait`."""
        if self._work is not None:
            self._vigil.wait(self._work, deadline, [self._peer], doing)


class Differing(CollectiveMismatch):
    """A rank of another host has announced something else."""

    def __init__(self, theirs: Announcement, peer: int) -> None:
        super().__init__(f"rank {peer}: {theirs.what} at {theirs.site}")
        self.theirs = theirs
        self.peer = peer


def flat(tensor: Tensor) -> Tensor:
    """Return the elements in one dimension: the tensor's own memory if it is contiguous."""
    # Strides of what has one element or none mean nothing, and may be anything.
    return tensor.detach().contiguous().as_strided((tensor.numel(),), (1,))


def _bytes(tensor: Tensor) -> Tensor:
    return flat(tensor).view(torch.uint8)
