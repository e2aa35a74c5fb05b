"""What is used of torch.distributed. Its stubs know little of that: here it is Any."""

from __future__ import annotations

from typing import Any

import torch.distributed
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

dist: Any = torch.distributed
state: Any = distributed_c10d  # its functions, and what they keep of groups
c10d: Any = _distributed_c10d  # its classes in C++

ProcessGroup: Any = c10d.ProcessGroup
Work: Any = torch.distributed._Work  # type: ignore[attr-defined]
