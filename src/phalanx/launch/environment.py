"""The variables by which a rank learns who it is: torchrun's, and a few of our own."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

HOST = "127.0.0.1"
JOB_VARIABLE = "PHALANX_JOB"


class HeldPort:
    """A free port that nobody is given by chance, until rank 0 listens on it.

    The socket is bound and never listens. The kernel gives its port to nobody who asks for just
    any, and to nobody who connects; who asks for this port, with SO_REUSEADDR, can listen on it.
    """

    def __init__(self, host: str = HOST) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.number: int = self._socket.getsockname()[1]

    def close(self) -> None:
        self._socket.close()


@dataclass(frozen=True)
class Job:
    """What the ranks of a job on this machine share."""

    size: int
    name: str = field(default_factory=lambda: os.urandom(4).hex())
    secret: str = field(default_factory=lambda: os.urandom(32).hex(), repr=False)
    max_restarts: int = 0

    def variables(self, port: int, attempt: int) -> dict[str, str]:
        """Return what all ranks of one attempt are told."""
        size = str(self.size)
        return {
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "ROLE_WORLD_SIZE": size,
            "GROUP_WORLD_SIZE": "1",
            "GROUP_RANK": "0",
            "ROLE_NAME": "default",
            "MASTER_ADDR": HOST,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": self.name,
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
            # Rank 0 runs torch's store itself, on the port that is held for it.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "PHALANX_SECRET": self.secret,
            # With the port, so that it means nothing to ranks that are told of another.
            JOB_VARIABLE: f"{self.name}:{attempt}:{port}",
        }

    @staticmethod
    def rank_variables(rank: int) -> dict[str, str]:
        """Return what one rank is told."""
        return dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
