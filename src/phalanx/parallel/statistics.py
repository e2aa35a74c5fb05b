"""What DistributedDataParallel tells about itself: how it is set up, and where its time goes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from phalanx import logs
from phalanx.parallel.buckets import Bucket

if TYPE_CHECKING:
    from phalanx.parallel.ddp import DistributedDataParallel

_log = logs.area("ddp")

_NAMES = {
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "float32": "float",
    "float64": "double",
}

_ENVIRONMENT = {
    "master_port": "MASTER_PORT",
    "master_addr": "MASTER_ADDR",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
}
_SAMPLE_RATE = 100
_ALWAYS_SAMPLED = 10  # iterations at the beginning

_SPANS = {
    "forward_compute_time": ("forward_compute_time_start", "backward_compute_time_start"),
    "backward_compute_time": ("backward_compute_time_start", "backward_compute_time_end"),
    "backward_comm_time": ("backward_comm_time_start", "backward_comm_time_end"),
    "backward_compute_comm_overlap_time": ("backward_comm_time_start", "backward_compute_time_end"),
}


class HasOrder(Protocol):
    """What knows in which order gradients have arrived."""

    @property
    def order(self) -> Sequence[int]: ...


class Statistics:
    """Facts and times (in ns) of one model, under the names of torch's DDPLoggingData."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._clock: dict[str, int] = {}
        self._totals = dict.fromkeys(_SPANS, 0)
        self._samples = 0
        self._finished = False
        self._sample_rate = _SAMPLE_RATE
        self._usage: HasOrder | None = None

    def describe(
        self,
        ddp: DistributedDataParallel,
        parameters: Sequence[nn.Parameter],
        static_graph: bool,
    ) -> None:
        """Take down how a model is set up."""
        for name, variable in _ENVIRONMENT.items():
            self._facts[name] = os.environ.get(variable, "N/A")
        sizes = [p.numel() * p.element_size() for p in parameters]
        kinds = {type(layer).__name__ for layer in ddp.module.modules()}
        self._facts.update(
            world_size=ddp.process_group.size(),
            rank=ddp.process_group.rank(),
            module_name=type(ddp.module).__name__,
            device_ids="",
            output_device=-1,
            backend_name=ddp.process_group.name(),
            broadcast_buffers=int(ddp.forward_sync_buffers),
            bucket_cap_bytes=ddp.bucket_bytes_cap,
            find_unused_parameters=int(ddp.find_unused_parameters),
            gradient_as_bucket_view=int(ddp.gradient_as_bucket_view),
            static_graph=int(static_graph),
            is_multi_device_module=0,
            has_sync_bn=int("SyncBatchNorm" in kinds),
            num_parameter_tensors=len(parameters),
            total_parameter_size_bytes=sum(sizes),
            dtypes=", ".join(sorted({_torch_name(p.dtype) for p in parameters})),
        )

    def buckets(self, buckets: Sequence[Bucket], rebuilt: bool) -> None:
        """Take down which buckets there are."""
        prefix = "rebuilt_" if rebuilt else ""
        self._facts[f"{prefix}bucket_sizes"] = ", ".join(str(bucket.nbytes) for bucket in buckets)
        if rebuilt:
            self._facts["has_rebuilt_buckets"] = 1
            self._facts["rebuilt_per_bucket_param_indices"] = ", ".join(
                " ".join(str(slot.index) for slot in bucket.slots) for bucket in buckets
            )

    def set_sample_rate(self, rate: int) -> None:
        """Keep the times of every ``rate``'th iteration, after the first few."""
        self._sample_rate = rate

    def forward_begins(self, iteration: int) -> None:
        """Keep the times of the iteration that has ended, if it is one to be kept."""
        sampled = iteration <= _ALWAYS_SAMPLED or iteration % self._sample_rate == 0
        if iteration and sampled and self._finished:
            self._samples += 1
            self._facts["iteration"] = iteration
            for name, (begin, end) in _SPANS.items():
                span = max(self._clock.get(end, 0) - self._clock.get(begin, 0), 0)
                self._facts[name] = span
                self._totals[name] += span
                self._facts[f"avg_{name}"] = self._totals[name] // self._samples
            self._facts.update(self._clock)
        self._finished = False
        self._clock = {"forward_compute_time_start": time.perf_counter_ns()}

    def backward_begins(self) -> None:
        self._clock["backward_compute_time_start"] = time.perf_counter_ns()

    def communication_begins(self) -> None:
        self._clock.setdefault("backward_comm_time_start", time.perf_counter_ns())

    def computation_ends(self) -> None:
        now = self._clock["backward_compute_time_end"] = time.perf_counter_ns()
        self._clock.setdefault("backward_comm_time_start", now)

    def communication_ends(self) -> None:
        self._clock["backward_comm_time_end"] = time.perf_counter_ns()
        self._finished = True

    def pass_ends(self, usage: HasOrder, num_buckets: int, unused_bytes: int) -> None:
        """Take down what a backward pass has done."""
        self._usage = usage
        self._facts["num_buckets_reduced"] = num_buckets
        self._facts["unused_parameter_size"] = unused_bytes

    def set_error_and_log(self, message: str) -> None:
        """Remember an error, and log it."""
        self._facts["has_error"] = 1
        self._facts["error"] = message
        self._facts.setdefault("iteration", 0)
        _log.error("%s", message)

    def set_fact(self, name: str, value: Any) -> None:
        """Take down one more fact."""
        self._facts[name] = value

    def data(self) -> dict[str, Any]:
        """Return all facts by name."""
        facts = dict(self._facts)
        if self._usage is not None:
            order = ", ".join(map(str, self._usage.order))
            facts["prev_iteration_grad_ready_order_indices"] = order
        return facts

    def table(self) -> str:
        """Return the facts as lines to read: setting, buckets, times."""
        data = self.data()
        times = {k: v for k, v in data.items() if k.startswith("avg_")}
        rest = {
            name: value
            for name, value in data.items()
            if not name.endswith(("_time", "_start", "_end")) and value not in ("N/A", "")
        }
        width = max(map(len, [*rest, *times]), default=0)
        lines = [f"{name:<{width}}  {value}" for name, value in rest.items()]
        lines += [f"{name:<{width}}  {value / 1e6:.3f} ms" for name, value in times.items()]
        return "\n".join(lines)


def _torch_name(dtype: Any) -> str:
    """Return the name that torch's logging has for an element type."""
    name = str(dtype).removeprefix("torch.")
    return _NAMES.get(name, name)


def dump_environment() -> None:
    """Print the environment variables that matter to training."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"):
        print(f"env:{name}={os.environ.get(name, 'N/A')}")
