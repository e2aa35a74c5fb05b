"""Programs of torch.distributed that are tested on processes, on thread ranks as well."""

import inspect

import pytest
import test_torch_backend
import test_torch_ddp
import test_torch_ecosystem
import test_torch_sharding

from phalanx.testing import torch_world

MODULES = [test_torch_backend, test_torch_ddp, test_torch_ecosystem, test_torch_sharding]


class OnThreads:
    """What the tests ask for results: `of(program)` runs it on two thread ranks."""

    def of(self, program, rtol=0.0, atol=0.0):
        return torch_world(2).run(program)


def found():
    for module in MODULES:
        for name, function in vars(module).items():
            if name.startswith("test_") and "outcomes" in inspect.signature(function).parameters:
                yield pytest.param(function, id=f"{module.__name__}-{name}")


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch uses it in its optimizers
@pytest.mark.parametrize("test", list(found()))
def test_programs(test, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files there
    test(OnThreads())
