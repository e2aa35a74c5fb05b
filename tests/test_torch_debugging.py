"""What torch's and Phalanx's means of debugging say of jobs on the backend."""

from __future__ import annotations

import json
import time
import urllib.request
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch_ranks import run_torch

import phalanx

SIZE = 2


def said(call):
    """Return the error of a call, None if there is none."""
    try:
        call()
    except phalanx.DistError as error:
        return str(error)
    return None


def _mismatches():
    dist.set_debug_level_from_env()
    rank = dist.get_rank()
    reduced = torch.tensor([rank + 1.0])
    dist.all_reduce(reduced, group=dist.new_group())
    model = DistributedDataParallel(nn.Linear(3, 2), find_unused_parameters=True)
    model(torch.ones(1, 3)).sum().backward()

    def operation():
        if rank == 0:
            dist.all_gather([torch.ones(4)] * SIZE, torch.ones(4))
        else:
            dist.all_reduce(torch.ones(4))

    dtype = torch.float64 if rank else torch.float32
    messages = {
        "operation": said(operation),
        "size": said(lambda: dist.all_reduce(torch.ones(4 + rank))),
        "dtype": said(lambda: dist.all_reduce(torch.ones(4, dtype=dtype))),
        "source": said(lambda: dist.broadcast(torch.ones(4), src=rank)),
    }
    works = []
    messages["asynchronous"] = said(
        lambda: works.append(dist.all_reduce(torch.ones(6 + rank), async_op=True))
    )
    assert len(works) == (messages["asynchronous"] is None)
    if works:
        messages["waiting"] = said(works[0].wait)
    shaped = torch.arange(6.0).reshape((2, 3) if rank else (1, 6)) * (rank + 1)
    messages["shape"] = said(lambda: dist.all_reduce(shaped))
    scale = 1 + rank if messages["shape"] else 3
    assert shaped.flatten().tolist() == [scale * each for each in range(6)]
    return dist.get_debug_level().name, reduced.item(), messages


FACTS = {
    "shape": ["float32[1, 6]", "float32[2, 3]", "different shapes"],
    "operation": ["all_gather(float32[4])", "all_reduce(float32[4], SUM)"],
    "size": ["float32[4]", "float32[5]"],
    "dtype": ["float32[4]", "float64[4]"],
    "asynchronous": ["float32[6]", "float32[7]"],
    "waiting": ["float32[6]", "float32[7]"],
    "source": ["src=0", "src=1"],
}


@pytest.mark.parametrize("level", ["OFF", "INFO", "DETAIL"])
def test_mismatches_are_named_at_all_debug_levels(monkeypatch, level):
    # With Gloo, DETAIL and DistributedDataParallel together end the process.
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", level)
    for name, reduced, messages in run_torch(_mismatches, SIZE):
        assert (name, reduced) == (level, 3)
        if level != "DETAIL":
            assert messages.pop("shape") is None
            assert messages.pop("asynchronous") is None  # raised by wait() instead
        for kind, message in messages.items():
            for fact in (*FACTS[kind], "rank 0", "rank 1", "test_torch_debugging.py"):
                assert fact in message
            assert ("checksum" in message) == (level == "DETAIL")


def _wait_in_vain():
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        message = said(lambda: dist.monitored_barrier(timeout=timedelta(seconds=0.5)))
        store.set("given up", "")
        return message
    limit = time.monotonic() + 60
    while not store.check(["given up"]) and time.monotonic() < limit:
        time.sleep(0.01)
    return None


def test_a_missing_rank_is_named():
    message, _ = run_torch(_wait_in_vain, SIZE)
    assert "rank 1 is busy" in message.lower()


def _served():
    dist.all_reduce(torch.ones(3))
    server = c10d._WorkerServer("127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.port}/handler"
    answers = []
    for name in ("phalanx_flight_record", "fr_trace_json"):
        request = urllib.request.Request(f"{address}/{name}", method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            answers.append(json.load(answer))
    server.shutdown()
    assert c10d._dump_fr_trace()
    return answers


def test_torchs_debug_server_tells_the_flight_record():
    for rank, (record, trace) in enumerate(run_torch(_served, SIZE)):
        assert record["rank"] == rank
        (entry,) = [e for e in record["groups"][0]["entries"] if e["op"] == "all_reduce"]
        assert (entry["dtype"], entry["shape"]) == ("float32", [3])
        assert "test_torch_debugging.py" in entry["site"]
        assert "entries" not in trace  # torch's own recorder sees what is in C++
