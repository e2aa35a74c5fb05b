import pickle
from collections import OrderedDict

import pytest
import torch

import phalanx as dist


class Thing:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other.value

    __hash__ = None


def things(rank):
    return [rank, "x" * 1000 * rank, {"a": [rank]}, None, Thing(rank)]


def test_every_object_collective(run):
    def body():
        rank, size = dist.get_rank(), dist.get_world_size()
        objects = [None] * size
        dist.all_gather_object(objects, things(rank))
        assert objects == [things(r) for r in range(size)]

        objects = [None] * size if rank == 1 else None
        dist.gather_object(things(rank), objects, dst=1)
        assert rank != 1 or objects == [things(r) for r in range(size)]

        objects = things(2) if rank == 2 else [None] * 5
        dist.broadcast_object_list(objects, src=2, device=torch.device("cpu"))
        assert objects == things(2)

        output = [None]
        dist.scatter_object_list(output, [things(r) for r in range(size)] if rank == 0 else None)
        assert output == [things(rank)]

        if rank == 0:
            dist.send_object_list(things(7), 2)
        elif rank == 2:
            objects = [None] * 5
            assert dist.recv_object_list(objects, 0) == 0
            assert objects == things(7)

    run(body, 3)


def test_objects_in_a_group(run):
    def body():
        rank = dist.get_rank()
        pair = dist.new_group([0, 2])
        if rank == 1:
            with pytest.warns(UserWarning, match="broadcast_object_list"):
                dist.broadcast_object_list([1], 0, group=pair)
            return
        objects = [rank]
        dist.broadcast_object_list(objects, group=pair, group_src=1)
        assert objects == [2]
        if rank == 2:
            dist.send_object_list([1, 2], group=pair, group_dst=0)
        else:
            objects = [None, None]
            assert dist.recv_object_list(objects, group=pair) == 2
            assert objects == [1, 2]

    run(body, 3)


def test_bad_lists(run):
    def body():
        with pytest.raises(ValueError, match="list of size at least 1"):
            dist.scatter_object_list([], [1, 2])
        with pytest.raises(ValueError, match="1 for 2"):
            dist.all_gather_object([None], 3)
        if dist.get_rank() == 0:
            with pytest.raises(ValueError, match="input_list"):
                dist.scatter_object_list([None], None)
            with pytest.raises(ValueError, match="object_gather_list"):
                dist.gather_object(1)
            with pytest.raises(ValueError, match="3 for 2"):
                dist.scatter_object_list([None], [1, 2, 3])
            with pytest.raises(ValueError, match="1 for 2"):
                dist.gather_object(1, [None])

    run(body, 2)


def test_lists_may_have_spare_places(run):
    def body():
        rank = dist.get_rank()
        places = [None, None, "spare"]
        dist.all_gather_object(places, rank + 1)
        assert places == [1, 2, "spare"]
        places = [None, None, "spare"]
        dist.gather_object("ab"[rank], places if rank == 1 else None, 1)
        assert places == (["a", "b", "spare"] if rank == 1 else [None, None, "spare"])

    run(body, 2)


def test_weights_only_accepts_tensors_and_refuses_code(run):
    def body():
        rank = dist.get_rank()
        state = OrderedDict(w=torch.arange(3.0), n=[1, "two", (3.0, None)])
        objects = [state if rank == 0 else None]
        dist.broadcast_object_list(objects, 0, weights_only=True)
        assert torch.equal(objects[0]["w"], torch.arange(3.0))
        assert objects[0]["n"] == state["n"]
        gathered = [None, None]
        with pytest.raises(pickle.UnpicklingError, match="Thing"):
            dist.all_gather_object(gathered, Thing(1), weights_only=True)

    run(body, 2)
