"""What one run of PyTorch's tests is: who is tested, with how many ranks, and how."""

from __future__ import annotations

import dataclasses
import json
import os

# Ranks that are started anew, not forked, learn from here what run they belong to.
VARIABLE = "PHALANX_PYTORCH_SUITE"

WAYS = {
    "backend": "torch.distributed on the backend phalanx, under its own name",
    "as-gloo": "torch.distributed on the backend phalanx, where the tests say gloo",
    "package": "phalanx in place of torch.distributed, its DistributedDataParallel and the rest",
    "gloo": "torch.distributed on Gloo, the yardstick",
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    way: str
    world_size: int
    shim: bool = False
    start_method: str = "fork"
    timeout: int = 120

    @property
    def backend(self) -> str:
        """Return the name of the backend that the tests are told."""
        return "phalanx" if self.way == "backend" else "gloo"

    @property
    def family(self) -> str:
        """Return whose parts above the backend are used: ``package`` or ``torch``."""
        return "package" if self.way == "package" else "torch"

    def export(self) -> None:
        """Put the settings where this process's tests and the ranks it starts look for them."""
        os.environ[VARIABLE] = json.dumps(dataclasses.asdict(self))
        os.environ["BACKEND"] = self.backend
        os.environ["WORLD_SIZE"] = str(self.world_size)
        os.environ["INIT_METHOD"] = "file://"  # each test makes a file for it
        os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    @classmethod
    def imported(cls) -> Settings:
        """Return the settings that were exported."""
        return cls(**json.loads(os.environ[VARIABLE]))
