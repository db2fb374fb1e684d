"""Which dimension of a mesh a new world size changes."""

from __future__ import annotations

import pytest

from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.ir.mesh import MeshShape, Replicate, Shard, Sharding
from fsdpckpt.transform.placements import resized

MESH = MeshShape((2, 4, 2), ("dp_replicate", "dp_shard", "tp"))


def test_of_two_dimensions_that_cut_every_tensor_the_first_is_fsdps() -> None:
    everywhere = [Sharding(MESH, (Replicate(), Shard(0), Shard(dim))) for dim in (0, 1)]
    assert resized({MESH: everywhere}, 8, source="x")[MESH].sizes == (2, 2, 2)
    assert resized({MESH: everywhere}, 16, source="x")[MESH] is MESH


def test_a_dimension_that_leaves_one_tensor_whole_is_not_fsdps() -> None:
    mesh = MeshShape((2, 2), ("tp", "dp"))
    shardings = [Sharding(mesh, (Shard(0), Shard(0))), Sharding(mesh, (None, Shard(0)))]
    assert resized({mesh: shardings}, 6, source="x")[mesh].sizes == (2, 3)


def test_replicas_beside_tensor_parallelism_say_nothing_of_fsdp() -> None:
    mesh = MeshShape((2, 2), ("dp", "tp"))
    shardings = [Sharding(mesh, (Replicate(), Shard(0))), Sharding(mesh, (Replicate(), Replicate()))]
    with pytest.raises(NeedsInformationError, match="nothing says which of its dimensions FSDP shards over"):
        resized({mesh: shardings}, 8, source="x")
    assert resized({mesh: shardings}, 4, source="x")[mesh] is mesh
