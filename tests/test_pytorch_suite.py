"""What stands in for torch.distributed in PyTorch's own tests has all that they look up."""

import re
import subprocess
import sys
from pathlib import Path

import torch

TESTS = Path(torch.__file__).parent / "testing/_internal/distributed/distributed_test.py"

# What the tests take from modules below torch.distributed, under the names that they give it.
IMPORTED = [
    "DistributedDataParallel",
    "DistributedSampler",
    "SyncBatchNorm",
    "_BucketCapacityConfig",
    "_DEFAULT_BUCKET_CAP_MB",
    "_MB_TO_BYTES",
    "_MixedPrecision",
    "_apply_optimizer_in_backward",
    "_dump_DDP_relevant_env_vars",
    "_get_default_group",
    "_get_pg_config",
    "_sync_module_states",
    "_verify_param_shape_across_processes",
    "averagers",
    "default",
    "get_world_size",
    "hierarchicalSGD",
    "model_averaging_utils",
    "post_localSGD",
    "post_localSGD_optimizer",
    "powerSGD",
    "quantization_hooks",
]

# Only a test that needs NCCL itself uses these.
NOT_OURS = {"BroadcastOptions", "ProcessGroupNCCL"}


def run(code, *arguments):
    """Run a program in a process of its own: importing the stand-in changes it for good."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_names_are_there():
    used = set(re.findall(r"\bdist\.(\w+)", TESTS.read_text())) - NOT_OURS
    assert len(used) > 50
    missing = run(
        "import sys; from phalanx.testing import pytorch_suite\n"
        "print(*[name for name in sys.argv[1:] if not hasattr(pytorch_suite, name)])",
        *sorted(used),
        *IMPORTED,
    )
    assert missing.split() == []


def test_phalanx_answers_to_other_names():
    run(
        """
import torch
from phalanx.testing import pytorch_suite as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_backend() == "gloo" and dist.group.WORLD.name() == "gloo"
assert dist.get_backend(dist.new_group(backend="nccl")) == "nccl"
assert type(torch.distributed.new_group()) is dist.ProcessGroup

with torch.autograd.profiler.profile(record_shapes=True) as profile:
    dist.all_reduce(torch.ones(3, dtype=torch.complex64))
(event,) = [e for e in profile.function_events if e.name.startswith("gloo:")]
assert event.is_async and event.input_shapes == [[3, 2]]

model = dist.DistributedDataParallel(torch.nn.Linear(2, 2), device_ids=[0], output_device=0)
assert model._get_ddp_logging_data()["gloo_num_threads"] == 2
dist.destroy_process_group()
"""
    )


def test_defaults_of_torch_are_replaced():
    run(
        """
import sys, types
import torch.distributed

def reduce(self, fn=torch.distributed.all_reduce, dst=None, kind=torch.float): pass

base = type("_DistTestBase", (), {"reduce": reduce})
tests = types.SimpleNamespace(DistributedTest=types.SimpleNamespace(_DistTestBase=base))
sys.modules["torch.testing._internal.distributed.distributed_test"] = tests
from phalanx.testing import pytorch_suite as dist
assert reduce.__defaults__ == (dist.all_reduce, None, torch.float)
"""
    )
