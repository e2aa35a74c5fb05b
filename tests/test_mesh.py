import pytest
import torch

import phalanx as dist


def test_one_dimension_is_the_world(run):
    def body():
        mesh = dist.init_device_mesh("cpu", (3,))
        assert mesh.get_group() is dist.group.WORLD
        assert mesh.shape == (3,)
        assert mesh.size() == 3
        assert mesh.ndim == 1
        assert mesh.mesh.tolist() == [0, 1, 2]
        assert mesh.get_local_rank() == mesh.get_rank() == dist.get_rank()
        assert mesh.get_coordinate() == (dist.get_rank(),)

    run(body, 3)


def test_two_dimensions(run):
    def body():
        rank = dist.get_rank()
        mesh = dist.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        assert mesh.mesh.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert mesh.get_coordinate() == (rank // 3, rank % 3)
        assert mesh.size(1) == 3
        assert repr(mesh) == "DeviceMesh((dp=2, tp=3), 'cpu')"
        for dim, index in (("dp", 0), ("tp", 1)):
            assert mesh.get_group(dim) is mesh.get_group(index) is mesh[dim].get_group()
            assert mesh.get_local_rank(dim) == mesh.get_coordinate()[index]
        assert mesh.get_all_groups() == [mesh.get_group(0), mesh.get_group(1)]
        assert mesh["tp"].mesh.tolist() == [rank // 3 * 3 + i for i in range(3)]
        assert dist.get_process_group_ranks(mesh.get_group("dp")) == [rank % 3, rank % 3 + 3]
        tensor = torch.tensor([10.0**rank])
        dist.all_reduce(tensor, group=mesh.get_group("tp"))
        assert tensor.item() == (111 if rank < 3 else 111000)
        with pytest.raises(RuntimeError, match="mesh_dim"):
            mesh.get_group()
        with pytest.raises(KeyError, match="known: dp, tp"):
            mesh["pp"]
        with pytest.raises(KeyError, match="order"):
            mesh["tp", "dp"]
        with pytest.raises(KeyError, match="dp"):
            mesh.get_group("pp")

    run(body, 6)


def test_slices_and_flattening(run):
    def body():
        rank = dist.get_rank()
        mesh = dist.init_device_mesh("cpu", (2, 3, 2), mesh_dim_names=("dp", "cp", "tp"))
        part = mesh["dp", "cp"]
        assert part.shape == (2, 3)
        assert part.mesh.tolist() == [
            [rank % 2 + 6 * dp + 2 * cp for cp in range(3)] for dp in range(2)
        ]
        assert mesh.get_coordinate() == (rank // 6, rank // 2 % 3, rank % 2)
        assert mesh["cp", "tp"].mesh.tolist() == [
            [rank // 6 * 6 + 2 * cp + tp for tp in range(2)] for cp in range(3)
        ]
        assert part["cp"] == mesh["cp"]
        assert part.get_group("cp") is mesh.get_group("cp")
        flat = part._flatten("dp_cp")
        assert flat.mesh.tolist() == [rank % 2 + 2 * i for i in range(6)]
        assert flat.get_local_rank() == flat.get_coordinate()[0] == rank // 2
        assert part._flatten("dp_cp") is flat
        assert mesh["dp_cp"].get_group() is mesh.get_group("dp_cp") is flat.get_group()
        assert mesh._flatten().get_group() is dist.group.WORLD
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=flat.get_group())
        assert tensor.item() == sum(range(rank % 2, 12, 2))
        with pytest.raises(ValueError, match="dp_cp"):
            mesh["cp", "tp"]._flatten("dp_cp")

    run(body, 12)


def test_grid_in_any_order(run):
    def body():
        grid = [[3, 1, 5], [2, 0, 4]]
        mesh = dist.DeviceMesh("cpu", grid, mesh_dim_names=("a", "b"))
        place = mesh.get_coordinate()
        assert mesh.mesh[place].item() == dist.get_rank()
        assert (mesh.get_local_rank("a"), mesh.get_local_rank("b")) == place
        assert mesh.get_group("b").ranks == grid[place[0]]  # in the order of the grid
        assert mesh.get_group("a").ranks == [row[place[1]] for row in grid]

    run(body, 6)


def test_ranks_outside_the_grid(run):
    def body():
        mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
        if dist.get_rank() < 2:
            return mesh.get_coordinate()
        with pytest.raises(RuntimeError, match="no group"):
            mesh.get_group("a")
        with pytest.raises(RuntimeError, match="not in"):
            _ = mesh["b"].mesh
        return mesh.get_coordinate()

    assert run(body, 3) == [(0, 0), (1, 0), None]


def test_equality_and_hash(run):
    def body():
        a = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        b = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        assert a == b
        assert hash(a) == hash(b)
        assert a != dist.init_device_mesh("cpu", (2,), mesh_dim_names=("y",))
        assert a != 3

    run(body, 2)


def test_from_groups(run):
    def body():
        mesh = dist.DeviceMesh.from_group(dist.group.WORLD, "cpu")
        assert mesh.get_group() is dist.group.WORLD
        other = dist.init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
        again = dist.DeviceMesh.from_group(
            other.get_all_groups(), "cpu", other.mesh, mesh_dim_names=("a", "b")
        )
        assert again == other
        assert again.get_group("a") is other.get_group("a")
        assert again.get_group("b") is other.get_group("b")
        assert again.get_coordinate() == (dist.get_rank() // 3, dist.get_rank() % 3)
        with pytest.raises(ValueError, match="fit"):
            dist.DeviceMesh.from_group(dist.group.WORLD, "cpu", [0, 2])
        with pytest.raises(ValueError, match="mesh"):
            dist.DeviceMesh.from_group(other.get_all_groups(), "cpu")

    run(body, 6)


def test_bad_meshes(run):
    def body():
        for wrong in ((3,), (2, 2)):
            with pytest.raises(RuntimeError, match="ranks 0 to 1"):
                dist.init_device_mesh("cpu", wrong)
        with pytest.raises(RuntimeError, match="mesh_dim_names"):
            dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "a"))
        with pytest.raises(RuntimeError, match="index"):
            dist.init_device_mesh("cuda:0", (2,))
        with pytest.raises(ValueError, match="once"):
            dist.DeviceMesh("cpu", [0, 0])
        with pytest.raises(RuntimeError, match="mesh_dim_names"):
            dist.init_device_mesh("cpu", (2,))["a"]
        with pytest.raises(RuntimeError, match="unknown dimensions"):
            dist.init_device_mesh("cpu", (2,), backend_override={1: "memory"})
        mesh = dist.init_device_mesh("cpu", (2,), backend_override={0: "memory"})
        assert mesh.get_group() is not dist.group.WORLD

    run(body, 2)
