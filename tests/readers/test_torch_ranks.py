"""One torch file per rank: real FSDP1 and FSDP2 files of old torch, and DTensor on every kind of mesh."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import fsdpckpt
from fsdpckpt.errors import SourceIncompleteError
from fsdpckpt.ir.checkpoint import Layout
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.readers.protocol import FileTable, PartContents
from fsdpckpt.readers.torch_ranks.read import read_torch_ranks
from fsdpckpt.storage.sources import Sources
from tests.makers import GOLDEN, Change, Make, add_copy, copied, edit, files, lose, put, swap
from tests.oracle.compare import identical
from tests.oracle.fake_group import as_rank
from tests.readers.contents import held, opened
from tests.readers.played_ranks import shard, shard_rows_twice
from tests.refusals import Refusal, corrupt, each_of, incomplete, unsafe, unsupported

SHARD = "_fsdp_shard_FSDP_SHARD_SEPARATOR__fsdp_wrapped_module_FSDP_SHARD_SEPARATOR_flat_param_0"


def torch_xla(rank: int, world_size: int) -> dict[str, Any]:
    """What a rank saves; the form is that of ``get_shard_metadata``."""
    info = {"": {SHARD: {"_orig_size": torch.Size([12]), "_orig_name": "_fsdp_wrapped_module.flat_param_0"}}}
    flat = {"_fsdp_wrapped_module.flat_param_0": (["_fpw_module.weight"], [torch.Size([4, 3])], [12])}
    metadata = {"shard_info": info, "flatten_info": flat, "buffer_info": {}, "world_size": world_size, "rank": rank}
    return {"model": {f"block.{SHARD}": torch.rand(12 // world_size)}, "shard_metadata": metadata}


def fairscale(_rank: int, world_size: int) -> dict[str, Any]:
    """What a rank saves; the form is that of ``local_metadata_dict``."""
    params = {"flat_param_0": {"names": ["weight"], "shapes": [torch.Size([4, 3])], "numels": [12], "padding": 0}}
    module = {"fsdp_path": "block", "params": params, "no_broadcast_optim_state": False, "shared_param_info": []}
    metadata = {"param_metadata": [module], "buffer_names": ["scale"]}
    return {"model": {"block.flat_param_0": torch.rand(12 // world_size)}, "shard_metadata": metadata}


def unflattened(rank: int, world_size: int) -> dict[str, Any]:
    """The same with ``flatten_parameters=False``: only the metadata shows that the vector is a shard."""
    saved = fairscale(rank, world_size)
    return {"model": {"block.weight": torch.rand(12 // world_size)}, "meta": {"of": saved["shard_metadata"]}}


def of_two(make: Any, name: str, library: str, *, metadata: bool = True, alone: bool = False) -> Refusal:
    """What two ranks save, all of it or one file."""

    def contents() -> dict[str, Any]:
        saved = {name.format(rank): make(rank, 2) for rank in range(2)}
        return saved if metadata else {name: {"model": content["model"]} for name, content in saved.items()}

    what = f"{make.__name__}{' with metadata' * metadata}{', one file' * alone}"
    given = name.format(1) if alone else ""
    says = (f"contains shards of {library}'s FSDP", 'pip install "fsdpckpt==0.1.*"')
    return unsupported(what, files(contents, given=given), *says)


DISCONTINUED = [
    of_two(*row, alone=alone, metadata=metadata)
    for alone in (False, True)
    for *row, metadata in (
        (torch_xla, "rank{}-of-2-model.pt", "torch_xla", True),
        (torch_xla, "run_rank-{:08d}-of-00000002.pth", "torch_xla", False),
        (fairscale, "last-shard{}.pt", "fairscale", True),
        (fairscale, "last-shard{}.pt", "fairscale", False),
        (unflattened, "last-shard{}.pt", "fairscale", True),
    )
]


def test_names_that_only_look_like_those_of_other_libraries_are_a_model(tmp_path: Path) -> None:
    state = {"flat_parameter_0": torch.rand(3), "shard_info": torch.rand(2), "my_fsdp_shard": torch.rand(4)}
    torch.save(state, tmp_path / "model.pt")
    assert [named.key for named in fsdpckpt.inspect(tmp_path / "model.pt").tensors] == list(state)


def read_files(paths: dict[int, Path]) -> tuple[PartContents, Any]:
    """The tree, and its root with every tensor as its bytes."""
    files = FileTable()
    with Sources() as sources:
        tree = read_torch_ranks({rank: str(path) for rank, path in paths.items()}, files, sources)
    return tree, held(tree.root, files.files())


def read(directory: Path, stem: str = "model") -> tuple[PartContents, Any]:
    found = {int(re.findall(r"_(\d+)\.pt", path.name)[0]): path for path in directory.glob(f"{stem}_*.pt")}
    return read_files(found)


def save_ranks(directory: Path, world: int, state_of: Callable[[int], Any], stem: str = "model") -> None:
    directory.mkdir(exist_ok=True)
    for rank in range(world):
        with as_rank(rank, world), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(state_of(rank), directory / f"{stem}_{rank}.pt")


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) + 0.5


# Files of old torch versions


SHARDED = ["torch-2.1/f1_flat_sh_st", "torch-2.4/f1_flat_sh_st", "torch-2.4/f1_orig_sh_st"]
SHARDED += ["torch-2.4/f1_orig_sh_dt", "torch-2.4/f1_hyb_sh_dt", "torch-2.4/f2_plain_t"]


@pytest.mark.parametrize("folder", SHARDED)
def test_sharded_files_of_real_runs_are_the_full_state(folder: str) -> None:
    directory = GOLDEN / folder
    truth = torch.load(directory / "truth" / "full.pt", weights_only=True)
    tree, model = read(directory)
    form = "ShardedTensor" if folder.endswith("_st") else "DTensor"
    (evidence,) = (each.message for each in tree.evidence)
    assert evidence.startswith(f"{tree.world_size} torch.save files, one per rank")
    assert f"holding {form} values (first: " in evidence
    assert tree.layout is Layout.SHARDED
    assert tree.problems == []
    assert tree.rank_values == {}
    assert model == held(dict(truth["model"]), ())
    optimizer = read(directory, "optim")[1]
    if folder.endswith("f2_plain_t"):  # an optimizer's own state dict: ids in the order of the parameters
        names = [name for name in truth["model"] if name != "buf"]
        optimizer["state"] = {names[key]: entry for key, entry in optimizer["state"].items()}
        optimizer["param_groups"][0]["params"] = names
        truth["optim"]["state"] = {name: truth["optim"]["state"][name] for name in names}
        truth["optim"]["param_groups"][0]["params"] = names
    assert optimizer["state"] == held(truth["optim"]["state"], ())
    assert optimizer["param_groups"] == held(truth["optim"]["param_groups"], ())


@pytest.mark.parametrize(
    ("folder", "world", "placement"), [(SHARDED[0], 2, None), (SHARDED[4], 4, "[Replicate(), Shard(0)]")]
)
def test_buffers_are_replicas_and_parameters_are_chunks(folder: str, world: int, placement: str | None) -> None:
    tree, _ = read(GOLDEN / folder)
    assert tree.world_size == world
    assert isinstance(tree.root, dict)
    buffer, weight = tree.root["buf"], tree.root["e.weight"]
    assert isinstance(buffer, Tensor)
    assert isinstance(weight, Tensor)
    assert (buffer.sharded, buffer.placement) == (False, "whole")
    assert buffer.chunks.rank.tolist() == list(range(world))
    assert weight.sharded is True
    assert placement is None or weight.placement == placement
    assert weight.chunks.size[:, 0].tolist() == [9, 8] * (world // 2)
    assert weight.chunks.rank.tolist() == list(range(world))
    assert weight.chunks.file.tolist() == list(range(world))


# DTensor on the fake process group


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_fsdp2_of_any_world_size(world: int, tmp_path: Path) -> None:
    """Rows fewer than ranks, uneven rows, one row; parameters and state by id with a replicated step."""
    weights = {f"w{rows}": numbered(rows, 3) for rows in (1, 2, 5, 7, 16)}

    def state_of(_rank: int) -> dict[str, Any]:
        model = shard(weights, world)
        moments = {i: {"step": torch.tensor(3.0), "exp_avg": value} for i, value in enumerate(model.values())}
        groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": list(moments)}]
        return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}

    save_ranks(tmp_path / "c", world, state_of)
    tree, found = read(tmp_path / "c")
    assert tree.world_size == world
    assert (world == 1) is tree.evidence[0].message.endswith(
        "one rank's torch.save file, of a world of one, holding DTensor values"
    )
    assert tree.problems == []
    assert found["model"] == {f"{name}.weight": value for name, value in held(weights, ()).items()}
    assert [entry["exp_avg"] for entry in found["optimizer"]["state"].values()] == list(held(weights, ()).values())
    assert found["optimizer"]["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0, 1, 2, 3, 4]}]
    step = tree.root["optimizer"]["state"][0]["step"]  # type: ignore[index,call-overload]
    assert (step.sharded, len(step.chunks)) == (False, world)  # type: ignore[union-attr]


@pytest.mark.parametrize(("data", "tensor"), [(2, 2), (3, 2), (4, 2)])
def test_fsdp_over_tensor_parallel_on_one_dimension(data: int, tensor: int, tmp_path: Path) -> None:
    """Includes sizes for which torch's own offsets are wrong."""
    weights = {f"w{rows}": numbered(rows, 3) for rows in (1, 2, 3, 5, 7, 9, 12)}
    save_ranks(tmp_path / "c", data * tensor, lambda _: shard_rows_twice(weights, data, tensor))
    tree, found = read(tmp_path / "c")
    assert found == {f"{name}.weight": value for name, value in held(weights, ()).items()}
    assert "_StridedShard(0" in tree.root["w7.weight"].placement  # type: ignore[index,call-overload,union-attr]


PLACEMENTS = list(itertools.product([Shard(0), Shard(1), Replicate(), _StridedShard(0, split_factor=2)], repeat=2))


def test_any_placement_on_a_mesh_of_two_dimensions(tmp_path: Path) -> None:
    values = {f"{i}.{rows}": (rows, pair) for i, pair in enumerate(PLACEMENTS) for rows in (3, 4, 7)}

    def state_of(_rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("a", "b"))
        return {
            key: torch.nn.Parameter(distribute_tensor(numbered(rows, 5), mesh, pair, src_data_rank=None))
            for key, (rows, pair) in values.items()
        }

    save_ranks(tmp_path / "c", 6, state_of)
    tree, found = read(tmp_path / "c")
    assert tree.problems == []
    assert found == {key: held(numbered(rows, 5), ()) for key, (rows, _) in values.items()}
    for key, (_, (first, second)) in values.items():
        chunks = tree.root[key].chunks  # type: ignore[index,call-overload,union-attr]
        copies = (3 if isinstance(first, Replicate) else 1) * (2 if isinstance(second, Replicate) else 1)
        elements = int(np.prod(chunks.size, axis=1).sum())
        assert elements == copies * values[key][0] * 5, key


def test_a_tensor_on_a_part_of_the_mesh_is_a_replica_on_the_other_parts(tmp_path: Path) -> None:
    def state_of(_rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        return {"w": distribute_tensor(numbered(7, 2), mesh["tp"], [Shard(0)], src_data_rank=None)}

    save_ranks(tmp_path / "c", 6, state_of)
    tree, found = read(tmp_path / "c")
    assert found == {"w": held(numbered(7, 2), ())}
    chunks = tree.root["w"].chunks  # type: ignore[index,call-overload,union-attr]
    assert chunks.start[:, 0].tolist() == [0, 3, 6, 0, 3, 6]


def test_parameters_on_some_ranks_only_are_not_missing_on_the_others(tmp_path: Path) -> None:
    """Pipeline stages: each half of the ranks has its own layers."""

    def state_of(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stage = rank // 2
        return {
            f"stage{stage}.w": distribute_tensor(numbered(5 + stage, 2), mesh["dp"], [Shard(0)], src_data_rank=None)
        }

    save_ranks(tmp_path / "c", 4, state_of)
    tree, found = read(tmp_path / "c")
    assert found == {"stage0.w": held(numbered(5, 2), ()), "stage1.w": held(numbered(6, 2), ())}
    assert tree.problems == []


def test_a_tensor_cut_along_columns_that_is_stored_transposed(tmp_path: Path) -> None:
    whole = numbered(6, 4)

    def state_of(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2,))
        local = whole[:, 2 * rank : 2 * rank + 2].t().contiguous().t()
        return {"w": DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=(4, 1))}

    save_ranks(tmp_path / "c", 2, state_of)
    tree, found = read(tmp_path / "c")
    assert found == {"w": held(whole, ())}
    assert tree.root["w"].chunks.stride.tolist() == [[1, 6], [1, 6]]  # type: ignore[index,call-overload,union-attr]


def test_a_dtensor_without_elements(tmp_path: Path) -> None:
    def state_of(_rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (3,))
        return {"w": distribute_tensor(torch.empty(0, 4), mesh, [Shard(0)], src_data_rank=None)}

    save_ranks(tmp_path / "c", 3, state_of)
    tree, found = read(tmp_path / "c")
    assert found == {"w": held(torch.empty(0, 4), ())}
    assert len(tree.root["w"].chunks) == 1  # type: ignore[index,call-overload,union-attr,arg-type]


@pytest.mark.parametrize("folder", ["torch-2.4/f1_orig_sh_st", "torch-2.4/f1_hyb_sh_dt"])
@pytest.mark.parametrize(
    ("name", "first"),
    [("checkpoint_{number}.pt", 0), ("{section}_{number}.pt", 1), ("{section}-ckpt-{number:03d}.pt", 1)],
)
def test_the_content_says_which_rank_saved_a_file_whose_name_does_not(
    folder: str, name: str, first: int, tmp_path: Path
) -> None:
    """The number of a checkpoint may be a step, and ranks do not count from 1."""
    count = len(list((GOLDEN / folder).glob("model_*.pt")))
    sections = ("model", "optim") if "section" in name else ("model",)
    for rank, section in itertools.product(range(count), sections):
        target = tmp_path / name.format(section=section, number=rank + first)
        shutil.copy(GOLDEN / folder / f"{section}_{rank}.pt", target)
    found = opened(tmp_path)
    truth = torch.load(GOLDEN / folder / "truth" / "full.pt", weights_only=True)
    assert found.model is not None and (found.world_size, found.layout, found.problems) == (count, Layout.SHARDED, ())
    assert held(found.model.params, found.files) == held(dict(truth["model"]), ())
    assert (found.optim is not None) is (len(sections) > 1)
    (tmp_path / name.format(section="model", number=first)).unlink()
    with pytest.raises(SourceIncompleteError, match=f"1 of {count} ranks is missing: 0"):
        opened(tmp_path)


# Values that differ, replicas, flattened slices


def test_values_of_the_ranks_own_are_kept_for_each(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = []
    for rank in range(3):
        generator = torch.Generator().manual_seed(rank)
        state = {
            "rng": {
                "cpu": generator.get_state(),
                "numpy": np.random.RandomState(rank).get_state(),
                "python": (3, (rank,)),
            },
            "epoch": 7,
            "loss": float("nan"),
            "only": {"first": 1} if rank == 0 else {},
            "best": torch.ones(2) if rank == 0 else None,
            "lists": list(range(rank)),
            "tensors": ([torch.rand(2)] * rank, *[{"one": torch.rand(3)}] * rank),
            "machine": {"state": {0: {"seen": torch.arange(rank + 1)}}, "up": True},
            "same": torch.full((4,), 2.5),
            "seen": torch.arange(rank + 1),
            "scale": torch.rand(2, dtype=torch.float64 if rank == 1 else torch.float32),
        }
        states.append(state)
        torch.save(state, tmp_path / f"extra_{rank}.pt")
    files = FileTable()
    with Sources() as sources:
        tree = read_torch_ranks({r: str(tmp_path / f"extra_{r}.pt") for r in range(3)}, files, sources)
    assert {path[-1] if len(path) == 1 else path[:2] for path in tree.rank_values} == {
        *(("rng", what) for what in ("cpu", "numpy", "python")),
        *("best", "lists", "tensors", ("machine", "state"), "seen", "scale"),
    }
    assert not any(problem.fatal for problem in tree.problems)
    assert tree.rank_values["best",][1:] == (None, None)
    assert tree.rank_values["lists",] == ([], [0], [0, 1])
    assert tree.rank_values["rng", "python", 1, 0] == (0, 1, 2)
    for path in (("rng", "cpu"), ("seen",), ("scale",), ("tensors",), ("machine", "state", 0, "seen")):
        for found, state in zip(tree.rank_values[path], states, strict=True):
            assert held(found, files.files()) == held(reduce(getitem, path, state), ())
    assert tree.root["epoch"] == 7  # type: ignore[index,call-overload]
    assert len(tree.root["same"].chunks) == 3  # type: ignore[index,call-overload,union-attr,arg-type]


def test_tensors_of_extras_are_equal_on_all_ranks_only_with_equal_elements(tmp_path: Path) -> None:
    """Bytes count between the first and the last element, in the same order; large tensors are not read."""
    last = torch.arange(9)
    last[8] = 9
    behind = torch.arange(10)
    behind[9] = 8
    large = torch.zeros((1 << 18) + 1)
    changed = large.clone()
    changed[7] = 1
    square = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    values: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        "equal": (square, square),
        "last": (torch.arange(9)[::4], last[::4]),
        "behind": (torch.arange(10)[:9:4], behind[:9:4]),
        "turned": (square, square.T),
        "turned and equal": (square, square.T.contiguous().T),
        "large": (large, large),
        "large and changed": (large, changed),
        "none": (torch.empty(0), torch.empty(0)),
    }
    states = [{"rng": {name: pair[rank] for name, pair in values.items()}} for rank in (0, 1)]
    paths = {rank: str(tmp_path / f"extra_{rank}.pt") for rank in (0, 1)}
    for rank, state in enumerate(states):
        torch.save(state, paths[rank])
    files = FileTable()
    with Sources() as sources:
        tree = read_torch_ranks(paths, files, sources, only_extras=True)
    different = {"last", "turned", "turned and equal", "large and changed"}
    assert tree.rank_values.keys() == {("rng", name) for name in different}
    for rank, state in enumerate(states):
        for name in different:
            assert held(tree.rank_values["rng", name][rank], files.files()) == held(state["rng"][name], ())


def test_an_optimizer_that_a_rank_has_without_states_is_no_other_order(tmp_path: Path) -> None:
    groups = [{"lr": 0.5, "params": [0, 1]}]
    states = {number: {"exp_avg": torch.ones(2, 3)} for number in (0, 1)}
    for rank, optimizer in enumerate(({"state": states, "param_groups": groups}, {"param_groups": groups}, {})):
        torch.save({"optimizer": optimizer}, tmp_path / f"optim_{rank}.pt")
    tree, found = read(tmp_path, "optim")
    assert found == held({"optimizer": {"state": states, "param_groups": groups}}, ())
    assert tree.notes == [] and not any(problem.kind == "parameter-order" for problem in tree.problems)


@pytest.mark.parametrize("group", [{}, {"params": "all"}, {"params": [None]}])
def test_groups_that_list_no_keys_say_no_order(group: dict[str, Any], tmp_path: Path) -> None:
    for rank in range(2):
        states = {0: {"exp_avg": numbered(2 + rank)}}
        torch.save({"state": states, "param_groups": [{"lr": 0.5, **group}]}, tmp_path / f"optim_{rank}.pt")
    tree, found = read(tmp_path, "optim")
    assert tree.notes == [] and found["param_groups"] == [{"lr": 0.5, **group}]


def test_what_a_rank_lacks_is_absent_there_and_not_none(tmp_path: Path) -> None:
    states: list[dict[str, Any]] = [
        {"epoch": 7, "seed": None},
        {"epoch": 7, "loader": {"at": 11}, "noise": torch.randn(3), "seed": 5, "rng": {"cuda": 1, "cpu": 2}},
        {"epoch": 7, "loader": {"at": 13}, "seed": 5, "rng": {"cpu": 2}},
    ]
    source = tmp_path / "ranks"
    source.mkdir()
    weight = torch.randn(7, 3)
    for rank, state in enumerate(states):
        torch.save({"w": weight}, source / f"model_world_size_3_rank_{rank}.pt")
        torch.save(state, source / f"extra_state_world_size_3_rank_{rank}.pt")
    report = fsdpckpt.convert(source, tmp_path / "full.pt", to="full")
    full = torch.load(tmp_path / "full.pt")
    assert {key: value for key, value in full.items() if key != "model"} == states[0]
    messages = "\n".join(note.message for note in report.notes)
    for key in ("loader", "noise", "rng"):
        assert f"{key} is not on rank 0 of 3" in messages
    fsdpckpt.convert(source, tmp_path / "five", to="sharded", container="torch", world_size=5, buffers=["none"])
    for rank in range(5):
        found = torch.load(tmp_path / "five" / f"extra_state_world_size_5_rank_{rank}.pt")
        expected = states[rank % 3]
        assert set(found) == set(expected)
        for key, value in expected.items():
            assert identical(found[key], value) if key == "noise" else found[key] == value


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("optim.param_groups.l.w.lr", (0.5, 0.25)),
        ("optim.state.l.w.exp_avg", (numbered(2), numbered(3))),
        ("optim.state.l.w.seen", (1, 2)),
        ("model.l.w", (numbered(2), numbered(3))),
        ("model.version", (1, 2)),
    ],
)
def test_flat_keys_of_a_section_that_differ_between_ranks_are_reported(key: str, values: Any, tmp_path: Path) -> None:
    """Without nesting, as DCP keeps them without planner data."""
    state = {"model": {"l.b": numbered(4)}, "optim.state.l.b.exp_avg": numbered(4), "optim.param_groups.l.b.lr": 0.1}
    for rank in range(2):
        torch.save({**state, key: values[rank], "epoch": 3, "seed": rank}, tmp_path / f"ckpt_rank{rank}.pt")
    found = opened(tmp_path)
    (problem,) = [problem for problem in found.problems if problem.fatal]
    assert (problem.kind, problem.key) == ("replica", key)
    assert list(found.rank_extra) == [{"epoch": 3, "seed": rank} for rank in range(2)]


def test_a_key_that_is_nan_is_one_key_of_all_ranks(tmp_path: Path) -> None:
    for rank in range(2):
        torch.save({"w.weight": torch.ones(3, 2)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
        extra = {"losses": {float("nan"): 3, 0.5: rank}}
        torch.save(extra, tmp_path / f"extra_state_world_size_2_rank_{rank}.pt")
    found = opened(tmp_path)
    assert found.problems == ()
    assert [str(each) for each in found.rank_extra] == ["{'losses': {nan: 3, 0.5: 0}}", "{'losses': {nan: 3, 0.5: 1}}"]


def test_equal_looking_replicas_are_decided_by_kind_and_not_by_value(tmp_path: Path) -> None:
    """Shards that happen to be equal are still shards; buffers that differ are still replicas."""

    def state_of(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2,))
        same = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)], run_check=False)
        return {"shards": same, "buffer": torch.full((2, 2), float(rank))}

    save_ranks(tmp_path / "c", 2, state_of)
    tree, found = read(tmp_path / "c")
    assert found["shards"] == held(torch.ones(4, 2), ())
    buffer = tree.root["buffer"]  # type: ignore[index,call-overload]
    assert isinstance(buffer, Tensor)
    assert (buffer.shape, len(buffer.chunks), buffer.sharded) == ((2, 2), 2, False)
    assert tree.rank_values == {}


def test_states_that_a_rank_never_made_are_no_missing_keys() -> None:
    assert read(GOLDEN / "torch-2.4/f1_orig_raw", "optim")[0].problems == []


def test_an_optimizer_without_states_is_not_flattened(tmp_path: Path) -> None:
    state = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1).state_dict()
    for rank in range(2):
        torch.save(state, tmp_path / f"model_{rank}.pt")
    assert read(tmp_path)[0].layout is Layout.FULL


def test_numpy_numbers_and_ordered_dicts_of_extras_stay_what_they_are_where_ranks_differ(tmp_path: Path) -> None:
    extra = {
        "keys": {np.int64(5): 1, np.float32(0.1): torch.ones(2), (1, np.uint8(2)): 3},
        "set": {np.int64(5), 6, np.datetime64("2026-01-02")},
        "two": OrderedDict([(np.int16(7), OrderedDict(a=1)), ("own", None)]),
    }

    def of_rank(rank: int) -> Any:
        inner = OrderedDict(c=rank, d=OrderedDict(e=1))
        inner.version = 3  # type: ignore[attr-defined]
        own = {"ordered": {**extra["two"], "own": rank}, "inner": inner, "rank": rank}
        return {"model": {"w": torch.ones(2)}, **extra, "one": OrderedDict(z=1), **own}

    save_ranks(tmp_path / "c", 2, of_rank, "model_world_size_2_rank")
    options: dict[str, Any] = {"to": "sharded", "container": "torch", "world_size": 2, "buffers": ["none"]}
    report = fsdpckpt.convert(tmp_path / "c", tmp_path / "out", **options)
    assert [note.kind for note in report.notes if note.kind in {"dropped", "encoded", "rank-mismatch"}] == []
    for rank in range(2):
        found = torch.load(tmp_path / "out" / f"extra_state_world_size_2_rank_{rank}.pt", weights_only=False)
        assert found["set"] == extra["set"] and list(found["keys"]) == list(extra["keys"])
        assert list(map(type, found["keys"])) == [np.int64, np.float32, tuple]
        assert found["ordered"] == {**extra["two"], "own": rank}
        ordered = (found["one"], found["inner"], found["inner"]["d"], found["two"])
        assert [type(each) for each in ordered] == [OrderedDict] * 4
        assert found["inner"]["c"] == found["rank"] == rank and vars(found["inner"]) == {"version": 3}


def test_keys_in_a_dcp_directory_are_the_texts_that_torch_makes_of_them(tmp_path: Path) -> None:
    keys = [np.int64(5), np.float32(0.1), np.bool_(True), torch.float32, (1, "a"), None, 3]
    content = {"model": {"w": torch.ones(2)}, "extra": {key: torch.ones(1) for key in keys}}
    torch.save(content, tmp_path / "full.pt")
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "dcp", container="dcp")
    found = {tensor.key for tensor in fsdpckpt.inspect(tmp_path / "dcp").tensors}
    assert found == {"w", *(set(flatten_state_dict(content)[0]) - {"model.w"})}


def test_what_a_rank_lacks_inside_a_list_is_absent_there(tmp_path: Path) -> None:
    for rank in range(2):
        states = [{"seed": 1, **({"cuda": 2} if rank == 0 else {})}, ({"n": 3, **({"m": 4} if rank == 0 else {})},)]
        torch.save({"states": states}, tmp_path / f"extra_state_world_size_2_rank_{rank}.pt")
        torch.save({"w": torch.ones(2, 3)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    first, second = opened(tmp_path).rank_extra
    assert first == {"states": [{"seed": 1, "cuda": 2}, ({"n": 3, "m": 4},)]}
    assert second == {"states": [{"seed": 1}, ({"n": 3},)]}


SHARDED_TENSORS = GOLDEN / "torch-2.1" / "f1_flat_sh_st"
HYBRID = GOLDEN / "torch-2.4" / "f1_hyb_sh_dt"
SWAPPED = "swapped rank files"
NOT_THE_RANKS = "are not the ranks that saved these files"


def under(name: str, *numbers: int, of: Sequence[int] = range(4)) -> Make:
    """The model of four ranks of FSDP1 under other numbers."""

    def make(directory: Path) -> None:
        for rank, number in zip(of, numbers, strict=True):
            shutil.copy(HYBRID / f"model_{rank}.pt", directory / name.format(number))

    return make


def four(*changes: Change) -> Make:
    """The files of four FSDP2 ranks, changed."""

    def make(directory: Path) -> None:
        weights = {"a": numbered(9, 2), "b": numbered(4, 4)}
        save_ranks(directory, 4, lambda _: {"model": shard(weights, 4), "epoch": 3, "buffer": numbered(3)})
        for change in changes:
            change(directory)

    return make


def on_ranks(world: int, state_of: Callable[[int], Any]) -> Make:
    return lambda directory: save_ranks(directory, world, state_of)


def as_dtensor(local: torch.Tensor, *placements: Any, **whole: Any) -> Callable[[int], Any]:
    """The same local tensor on both ranks."""

    def state_of(_rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2,))
        return {"a": {"w": DTensor.from_local(local, mesh, placements, run_check=False, **whole)}}

    return state_of


def at(coordinate: list[int]) -> Callable[[int], Any]:
    """Rank 1 says that it is there."""

    def state_of(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(numbered(4, 3), mesh, [Shard(0)], src_data_rank=None)
        if rank == 1:
            mesh._coordinate_on_dim = coordinate
        return {"w": weight}

    return state_of


class Harm:
    def __reduce__(self) -> Any:
        return (os.system, ("exit 1",))


REFUSALS = (
    # Ranks that are missing
    incomplete("one of two", copied(SHARDED_TENSORS, lose("model_1.pt", "optim*")), "1 of 2 ranks is missing: 1\n"),
    incomplete("a gap in the names", four(lose("model_[12].pt")), "2 of 4 ranks are missing: 1, 2\n"),
    incomplete("a gap, and the last", under("model_{}.pt", 0, 2, of=(0, 2)),
               "2 rank files are missing\n  - model_1.pt\n  - model_3.pt\n"),
    incomplete("the last two", four(lose("model_[23].pt")), "2 of 4 ranks are missing: 2, 3\n", about={"rank": 2}),
    incomplete("rank 0 by content", under("checkpoint_{}.pt", 1, 2, 3, of=(1, 2, 3)), "1 of 4 ranks is missing: 0\n"),
    # Numbers of files that are not those of ranks: the content says which rank saved a file
    *(
        corrupt(f"swapped files of {name}", copied(GOLDEN / name, swap("model_0.pt", "model_1.pt"), lose("optim*")),
                SWAPPED, "model_0.pt: expected rank 0, saved by rank 1\n  - DIR/model_1.pt: expected rank 1, saved by")
        for name in ("torch-2.1/f1_flat_sh_st", "torch-2.4/f1_orig_sh_dt", "torch-2.4/f2_plain_t")
    ),
    *(
        corrupt(f"ranks as {numbers}", under("ckpt_{}.pt", *numbers), NOT_THE_RANKS,
                f"ckpt_{numbers[2]}.pt: saved by rank 2")
        for numbers in ([0, 2, 1, 3], [7, 8, 9, 10], [0, 1, 2, 4])
    ),
    incomplete("epochs are never joined", under("epoch_{}.pt", 0, 1, 2, 3), "3 of 4 ranks are missing: 1, 2, 3"),
    incomplete("steps of one rank", under("step_{}.pt", 100, 200, of=(1, 1)), "3 of 4 ranks are missing: 0, 2, 3"),
    corrupt("one file twice", four(add_copy("model_0.pt", "model_2.pt")), SWAPPED, "model_2.pt: "),
    corrupt("a file of a larger run", four(put("model_4.pt", {"model": {"a": numbered(3)}})),
            "do not belong to a world of 4 ranks"),
    # Contents
    unsafe("one unsafe file", four(put("model_2.pt", {"model": Harm()})), about={"file": "DIR/model_2.pt"}),
    *(
        corrupt(f"a place outside of the mesh: {place}", on_ranks(2, at(place)), "coordinate outside its mesh")
        for place in ([2], [-1], [0, 0])
    ),
    unsupported("partial sums", on_ranks(2, as_dtensor(numbered(2, 2), Partial())), "a.w is placed as Partial"),
    corrupt("a local tensor of another shape", on_ranks(2, as_dtensor(numbered(3, 2), Shard(0), shape=(9, 2),
            stride=(2, 1))), "a.w: the local tensor is not what", about={"key": "a.w"}),
)  # fmt: skip


@each_of((*REFUSALS, *DISCONTINUED))
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)


def on_rank(rank: int, edit_state: Callable[[Any], object]) -> Change:
    def change(directory: Path) -> None:
        with as_rank(rank, 4):
            edit(f"model_{rank}.pt", edit_state)(directory)

    return change


def sharded_over_four(tensor: torch.Tensor) -> Any:
    return lambda state: state["model"].update(shard({"a": tensor}, 4))


WEIGHT, ALL = "model.a.weight", "a DTensor of shape (9, 2) and type float32 in ranks 0, 2, 3"
# What a rank has otherwise, and the problems with what is said of each: the kind, the key, whether it is fatal
DISAGREEMENTS: dict[str, tuple[Change, list[tuple[str, str, bool]], list[str]]] = {
    "a rank lacks keys": (
        on_rank(2, lambda state: (state["model"].pop("a.weight"), state.pop("buffer"), state.pop("epoch"))),
        [("missing-key", WEIGHT, True), ("missing-key", "buffer", False), ("missing-key", "epoch", False)],
        ["rank 2"],
    ),
    "a rank has a key more": (
        on_rank(3, lambda state: state.update(late=numbered(2))), [("missing-key", "late", False)], ["ranks 0, 1, 2"],
    ),
    "a plain tensor": (
        on_rank(1, lambda state: state["model"].update({"a.weight": numbered(3, 2)})),
        [("rank-mismatch", WEIGHT, True)],
        ["a plain tensor of shape (3, 2) and type float32 in rank 1", ALL],
    ),
    "a number": (
        on_rank(1, lambda state: state["model"].update({"a.weight": 7})), [("rank-mismatch", WEIGHT, True)],
        ["a value of type int in rank 1", ALL],
    ),
    "another dtype": (
        on_rank(1, sharded_over_four(numbered(9, 2).double())), [("rank-mismatch", WEIGHT, True)], ["float64"],
    ),
    "another shape": (
        on_rank(1, sharded_over_four(numbered(10, 2))), [("rank-mismatch", WEIGHT, True)], ["(10, 2)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_what_one_rank_has_otherwise_is_reported(name: str, tmp_path: Path) -> None:
    change, problems, texts = DISAGREEMENTS[name]
    four(change)(tmp_path)
    with Sources() as sources:
        paths = {rank: str(tmp_path / f"model_{rank}.pt") for rank in range(4)}
        tree = read_torch_ranks(paths, FileTable(), sources)
    found = [*tree.missing.values(), *tree.problems]
    assert sorted((problem.kind, problem.key, problem.fatal) for problem in found) == sorted(problems)
    assert all(text in problem.message for problem in found for text in texts)
