"""Which dimension of a mesh a new world size changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdpckpt.converters.target.mesh_options import parse_mesh, parse_meshes, parse_placements
from fsdpckpt.errors import NeedsInformationError, UsageError
from fsdpckpt.formats.torch.mesh import MAX_RANKS
from fsdpckpt.ir.checkpoint import ModelState
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.placements import MeshShape, Replicate, Shard, Sharding
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.meshes import containing_mesh, find_resized, resized, source_meshes
from fsdpckpt.transform.placements import PlacementRule, PlacementRules, SourcePlacements, TargetMesh, apply_placements
from tests.flat.flat_synthetic import checkpoint, whole

MESH = MeshShape((2, 4, 2), ("dp_replicate", "dp_shard", "tp"))
TWO = MeshShape((2, 3), ("dp", "tp"))


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
    with pytest.raises(NeedsInformationError, match="cannot tell which of its dimensions changes for 8 ranks") as error:
        resized({mesh: shardings}, 8, source="x")
    assert list(error.value.details) == ["--mesh dp=4,tp=2", "--mesh dp=2,tp=4"]
    with pytest.raises(NeedsInformationError) as error:
        resized({mesh: shardings}, 5, source="x")
    assert error.value.next_step == "add --mesh dp=2,tp=2 with sizes for 5 ranks"
    assert resized({mesh: shardings}, 4, source="x")[mesh] is mesh


def cut(text: str) -> dict[MeshShape, list[Sharding]]:
    """``dp_shard=2,tp=3``, several with a blank between; all but replicas cut every tensor."""
    meshes = [parse_mesh(one) for one in text.split()]
    return {
        mesh: [Sharding(mesh, tuple(Replicate() if "replicate" in name else Shard(0) for name in mesh.names or ()))]
        for mesh in meshes
    }


@pytest.mark.parametrize(
    ("source", "world_size", "target"),
    [
        ("dp_shard=2,tp=3", 9, "dp_shard=3,tp=3"),
        ("dp_shard=2,tp=3", 3, "dp_shard=1,tp=3"),
        ("dp_replicate=2,dp_shard=2", 6, "dp_replicate=2,dp_shard=3"),
        ("dp_replicate=2,dp_shard=4,tp=3", 12, "dp_replicate=2,dp_shard=2,tp=3"),
        ("fsdp=8 efsdp=4,ep=2", 6, "fsdp=6 efsdp=3,ep=2"),
        ("dp_replicate=2,fsdp=6 dp_replicate=2,efsdp=2,ep=3", 18, "dp_replicate=2,fsdp=9 dp_replicate=2,efsdp=3,ep=3"),
        ("dp_shard=2,cp=2,tp=2", 12, "dp_shard=3,cp=2,tp=2"),
        ("tp=4", 2, "tp=2"),
    ],
)
def test_only_fsdps_dimension_changes(source: str, world_size: int, target: str) -> None:
    assert " ".join(map(str, resized(cut(source), world_size, source="x").values())) == target


@pytest.mark.parametrize(
    ("source", "world_size", "targets", "multiple"),
    [
        ("dp_shard=2,tp=3", 4, ["dp_shard=4,tp=1"], 3),
        ("dp_shard=2,tp=6", 4, ["dp_shard=2,tp=2", "dp_shard=4,tp=1"], 6),
        ("dp_replicate=2,dp_shard=2", 3, ["dp_replicate=1,dp_shard=3"], 2),
        ("dp_replicate=2,dp_shard=2,tp=3", 9, ["dp_replicate=1,dp_shard=3,tp=3", "dp_replicate=1,dp_shard=9,tp=1"], 6),
        ("fsdp=4 efsdp=2,ep=2", 3, ["fsdp=3 efsdp=3,ep=1"], 2),
        ("fsdp=2,tp=3 efsdp=3,ep=2", 4, ["fsdp=4,tp=1 efsdp=2,ep=2", "fsdp=4,tp=1 efsdp=4,ep=1"], 6),
    ],
)
def test_where_the_others_do_not_divide_the_meshes_that_do_are_named(
    source: str, world_size: int, targets: list[str], multiple: int
) -> None:
    with pytest.raises(NeedsInformationError, match=f"world_size={world_size} does not fit the mesh of x") as error:
        resized(cut(source), world_size, source="x")
    assert list(error.value.details) == [" ".join(f"--mesh {mesh}" for mesh in one.split()) for one in targets]
    assert error.value.expected == f"a multiple of {multiple}"
    others = ", or another of those above" if len(targets) > 1 else ""
    assert error.value.next_step == f"add {error.value.details[0]!s}{others}"
    assert "which FSDP shards over" in str(error.value.why)


def test_a_dimension_without_a_name_is_called_by_its_number() -> None:
    mesh = MeshShape((2, 3))
    with pytest.raises(NeedsInformationError, match="does not fit the mesh of x, 2,3") as error:
        resized({mesh: [Sharding(mesh, (Shard(0), Shard(1)))]}, 4, source="x")
    assert str(error.value.why).startswith("only dimension 0 changes")


@pytest.mark.parametrize(
    ("part", "whole", "contained"),
    [
        ("fsdp=4", "fsdp=4", True),
        ("2,4", "2,4", True),
        ("4", "2,4", False),
        ("fsdp=4", "4", False),
        ("4", "fsdp=4", False),
        ("tp=2", "dp=2,tp=2", True),
        ("dp=2,tp=3", "dp=2,ep=2,tp=3", True),
        ("tp=2,dp=2", "dp=2,tp=2", False),
        ("tp=3", "dp=2,tp=2", False),
        ("dp=2,ep=2", "dp=2,tp=2", False),
        ("dp=2,tp=2", "tp=2", False),
    ],
)
def test_a_submesh_has_some_dimensions_of_the_whole_in_their_order(part: str, whole: str, contained: bool) -> None:
    mesh, other = parse_mesh(part), parse_mesh(whole)
    assert containing_mesh(mesh, [parse_mesh("x=9"), other]) == (other if contained else None)


def test_the_meshes_of_a_source_are_in_the_order_of_its_tensors_and_parts_of_others_are_none() -> None:
    held: dict[str, Any] = {"plain": whole(5)}
    for text in ("tp=2", "dp=2,tp=2", "efsdp=4,ep=1", "tp=2", "efsdp=4,ep=1"):
        mesh = parse_mesh(text)
        held[f"p{len(held)}"] = replace(whole(5), sharding=Sharding(mesh, (Replicate(),) * len(mesh.sizes)))
    found = source_meshes(checkpoint(4, model=ModelState(held)))
    assert list(map(str, found)) == ["dp=2,tp=2", "efsdp=4,ep=1"]


def test_replicas_are_given_up_on_all_meshes_or_on_none() -> None:
    meshes = cut("dp_replicate=2,fsdp=4 dp_replicate=2,efsdp=2,ep=2")
    found = find_resized(meshes, 6, source="x", keep_replicas=False)
    assert isinstance(found, dict)
    assert " ".join(map(str, found.values())) == "dp_replicate=1,fsdp=6 dp_replicate=1,efsdp=3,ep=2"
    found = find_resized(meshes, 12, source="x", keep_replicas=False)
    assert isinstance(found, dict)
    assert " ".join(map(str, found.values())) == "dp_replicate=2,fsdp=6 dp_replicate=2,efsdp=3,ep=2"


@pytest.mark.parametrize(
    ("texts", "meshes"),
    [
        (["2,4"], [MeshShape((2, 4))]),
        ([" dp = 2 , tp=04"], [MeshShape((2, 4), ("dp", "tp"))]),
        (["fsdp=4", "efsdp=2,ep=2"], [MeshShape((4,), ("fsdp",)), MeshShape((2, 2), ("efsdp", "ep"))]),
        (["dp=2,4"], "mesh='dp=2,4': '4' is not a dimension"),
        (["4,dp=2"], "mesh='4,dp=2': '4' is not a dimension"),
        (["dp=2,"], "mesh='dp=2,': '' is not a dimension"),
        (["dp=0"], "'dp=0' is not a dimension"),
        (["dp==2"], "'dp==2' is not a dimension"),
        (["=2"], "'=2' is not a dimension"),
        ([f"dp={'9' * 5000}"], "is not a dimension"),
        (["dp=2,dp=2"], "names dp twice"),
        (["4", "dp=4"], "mesh='4' is one of several, but has no names"),
        (["a=4", "b=2"], "mesh='a=4' has 4 ranks, and mesh='b=2' has 2"),
        (["a=2,b=3", "c=6", "b=3,a=2"], "two meshes have the dimensions a, b"),
        ([f"dp={MAX_RANKS}"], [MeshShape((MAX_RANKS,), ("dp",))]),
        ([f"dp={MAX_RANKS + 1}"], f"has {MAX_RANKS + 1:,} ranks"),
    ],
)
def test_meshes_are_read_as_they_are_typed(texts: list[str], meshes: Any) -> None:
    if isinstance(meshes, list):
        assert list(parse_meshes(texts)) == meshes
    else:
        with pytest.raises(UsageError, match=meshes):
            parse_meshes(texts)


@pytest.mark.parametrize(
    ("rules", "placed"),
    [
        ({"*": {"tp": "Shard(1)", "dp": "Shard(0)"}}, Sharding(TWO, (Shard(0), Shard(1)))),
        ({"*": {"tp": " shard( dim = 12 ) ", "dp": "replicate"}}, Sharding(TWO, (Replicate(), Shard(12)))),
        ({"*": {"dp": "Replicate( )"}}, Sharding(TWO, (Replicate(), None))),
        ({"*": None}, None),
        ({}, "is not a JSON object"),
        ([], "is not a JSON object"),
        ({"*": {}}, r"\* has no placements"),
        ({"*": ["Shard(0)"]}, r"\* has no placements"),
        ({"*": {"pp": "Shard(0)"}}, "mesh dimension pp, which mesh='dp=2,tp=3' does not have"),
        ({"*": {"tp": "Shard(-1)"}}, "a placement that cannot be written"),
        ({"*": {"tp": "_StridedShard(0, sf=2)"}}, "a placement that cannot be written"),
        ({"*": {"tp": "Shard(0) "}, "a": {"dp": None}}, "a has a placement that cannot be written: None"),
        ({"*": {"tp": 0}}, "a placement that cannot be written: 0"),
        ({"*": {"tp": f"Shard({'9' * 5000})"}}, "a placement that cannot be written"),
        ('{"*": {"tp": "Shard(0)", "tp": "Shard(1)"}}', "names the mesh dimension tp twice"),
        ('{"*": null, "a": null, "*": null}', r"two entries for \*"),
    ],
)
def test_placements_are_read_as_they_are_written(rules: Any, placed: Any, tmp_path: Path) -> None:
    path = tmp_path / "placements.json"
    path.write_text(rules if isinstance(rules, str) else json.dumps(rules))
    with Sources() as sources:
        if isinstance(placed, str):
            with pytest.raises(UsageError, match=placed) as error:
                parse_placements(str(path), [TWO], sources)
            assert (error.value.next_step == "write Shard(DIM)") is ("_StridedShard" in str(rules))
        else:
            assert parse_placements(str(path), [TWO], sources) == PlacementRules(
                str(path), (PlacementRule("*", placed),)
            )


def test_states_that_were_made_are_placed_like_others_of_their_shape() -> None:
    old, new = Sharding(TWO, (Shard(0), Replicate())), MeshShape((4, 3), ("dp", "tp"))
    states: dict[str, Any] = {
        "step": whole(),
        "made": replace(whole(5, 3), sharded=True),
        "kept": replace(whole(5, 3), sharded=False),
        "row": replace(whole(5), sharded=True),
    }
    model = ModelState({"w": replace(whole(5, 3), sharded=True, sharding=old), "b": whole(5)})
    held = checkpoint(6, model=model, optim=Optimizer.of({"w": states}, None))
    found = apply_placements(held, held, TargetMesh((new,), SourcePlacements({TWO: new})))
    placed = {named.key: named.tensor.sharding for named in found.tensors()}
    on_new = Sharding(new, old.placements)
    assert placed == {"w": on_new, "b": None, "w.step": None, "w.made": on_new, "w.kept": None, "w.row": None}


def test_without_a_model_the_states_of_one_shape_show_that_of_their_parameter() -> None:
    cut = Sharding(TWO, (Shard(0), Shard(1)))
    target = TargetMesh((TWO,), PlacementRules("p.json", (PlacementRule("*", cut),)))
    states: dict[str, Any] = {"step": whole(), "exp_avg": replace(whole(5, 3), sharded=True)}
    held = checkpoint(6, optim=Optimizer.of({"w": states}, None))
    found = apply_placements(held, held, target)
    assert {named.key: named.tensor.sharding for named in found.tensors()} == {"w.step": None, "w.exp_avg": cut}
    states["row"] = replace(whole(5), sharded=True)
    with pytest.raises(UsageError, match=r"w\.exp_avg has the shape \[5, 3\], a different one than its parameter"):
        apply_placements(held, held, target)
