import threading

import pytest
import torch

from phalanx.errors import DistTimeout
from phalanx.work import CompletedWork, JoinedWork, ThreadWork


def test_completed_work():
    tensor = torch.ones(1)
    work = CompletedWork([tensor], source=3)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    assert work.source_rank() == 3
    assert work.get_future().wait()[0] is tensor
    work.synchronize()
    with pytest.raises(ValueError, match="receive"):
        CompletedWork().source_rank()


def test_thread_work_reports_its_progress():
    gate, tensor = threading.Event(), torch.zeros(1)

    def call():
        gate.wait()
        tensor.fill_(1)
        return 2

    work = ThreadWork(call, [tensor]).start()
    future = work.get_future()
    assert not work.is_completed()
    assert not work.is_success()
    assert not future.done()
    with pytest.raises(DistTimeout, match=r"0\.01"):
        work.wait(0.01)
    gate.set()
    assert work.wait()
    assert work.is_success()
    assert future.wait()[0].item() == 1
    assert work.source_rank() == 2


def test_thread_work_raises_what_its_call_raised():
    def call():
        raise KeyError("k")

    work = ThreadWork(call, []).start()
    future = work.get_future()
    for _ in range(2):
        with pytest.raises(KeyError):
            work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), KeyError)
    with pytest.raises(Exception, match="k"):
        future.wait()


def test_joined_work():
    gate = threading.Event()
    late = ThreadWork(lambda: gate.wait() and None, [torch.ones(1)]).start()
    both = JoinedWork([CompletedWork([torch.zeros(1)]), late])
    assert not both.is_completed()
    with pytest.raises(DistTimeout):
        both.wait(0.01)
    gate.set()
    assert both.wait(10)
    assert both.is_success()
    assert [tensor.item() for tensor in both.result()] == [0, 1]
