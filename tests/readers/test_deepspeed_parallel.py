"""Pipeline stages of DeepSpeed and tensor-parallel ranks of AutoTP: checkpoints that DeepSpeed saved.

Beside them, shards that ``torch.as_strided`` cuts as the maps of AutoTP say, and the layer files of a pipeline of one
stage, as ``PipelineModule.save_state_dict`` of 0.19 writes them. Their names and the empty ``module`` are those of a
run on one process: an embedding that is tied to the head, a layer with a buffer, a function without a file, a norm.
"""

from __future__ import annotations

import copy
import math
import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from tests.makers import Change, Make, edit, files, lose, move, packed, swap, with_truth
from tests.oracle.compare import identical
from tests.readers.contents import opened, same_values
from tests.readers.junk import save
from tests.readers.test_deepspeed import GOLDEN
from tests.refusals import Refusal, corrupt, each_of, incomplete, unsupported

TRAINED = {  # in the order of the optimizer
    "tied_modules.embed.e.weight": torch.randn(11, 6),
    "1.l.weight": torch.randn(6, 6),
    "1.l.bias": torch.randn(6),
    "3.weight": torch.randn(6),
    "3.bias": torch.randn(6),
}
BUFFERS = {"tied_modules.embed.scale": torch.full((3,), 2.0), "1.count": torch.arange(4)}
MOMENTS = {name: {"exp_avg": torch.randn_like(value)} for name, value in TRAINED.items()}
PREFIXES = {0: "tied_modules.embed", 1: "1", 3: "3"}
RANKS = 2


def one_stage(layer: str = "layer_{:02d}-model_states.pt") -> dict[str, Any]:
    module = {**TRAINED, **BUFFERS}
    saved: dict[str, Any] = {
        layer.format(number): {
            name.removeprefix(f"{prefix}."): value for name, value in module.items() if name.startswith(f"{prefix}.")
        }
        for number, prefix in PREFIXES.items()
    }
    shapes = OrderedDict((name, value.shape) for name, value in TRAINED.items())
    described = {"buffer_names": list(BUFFERS), "param_shapes": [shapes], "frozen_param_shapes": None}
    described |= {"shared_params": {}, "frozen_param_fragments": None, "optimizer": None}
    ranks = {"dp_world_size": RANKS, "mp_world_size": 1, "global_steps": 1}
    saved["mp_rank_00_model_states.pt"] = {"module": None, **described, **ranks}
    weights, moments = (
        parts(list(TRAINED.values()), RANKS),
        parts([state["exp_avg"] for state in MOMENTS.values()], RANKS),
    )
    for rank in range(RANKS):
        state = {0: {"step": torch.tensor(1.0), "exp_avg": moments[rank]}}
        base = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
        padding = [len(weights[0]) * RANKS - sum(map(len, weights)) if rank == RANKS - 1 else 0]
        states = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [weights[rank]], "zero_stage": 1}
        states |= {"group_paddings": padding, "partition_count": [RANKS]}
        saved[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer_state_dict": states}
    return saved


@pytest.mark.parametrize("layer", ["layer_{:02d}-model_states.pt", "layer_{:02d}-model_00-model_states.pt"])
def test_one_stage_is_read_with_its_optimizer(layer: str, tmp_path: Path) -> None:
    step = tmp_path / "run" / "global_step1"
    files(lambda: one_stage(layer))(step)
    (step.parent / "latest").write_text("global_step1")
    found = opened(step.parent)
    states = {name: {**state, "step": torch.tensor(1.0)} for name, state in MOMENTS.items()}
    groups = [{"lr": 0.1, "params": list(TRAINED)}]
    same_values(found, model={**TRAINED, **BUFFERS}, optim={"state": states, "param_groups": groups})
    assert list(found.model.params)[:2] == ["tied_modules.embed.e.weight", "tied_modules.embed.scale"]  # type: ignore[union-attr]
    assert found.problems == () and all(entry.read_as for entry in found.ledger.account.entries)
    assert all(file.fate == "read" for file in found.ledger.account.files)
    fsdpckpt.convert(step.parent, tmp_path / "full.pt", verify="full")
    written = torch.load(tmp_path / "full.pt")["model"]
    assert all(identical(written[name], value) for name, value in {**TRAINED, **BUFFERS}.items())


def tied(last: bool = True, **others: dict[str, torch.Tensor]) -> Make:
    """A step whose tied embedding calls its weight as other layers do, is the ``last`` layer, too, and ``others``."""

    def made() -> dict[str, Any]:
        saved = one_stage()
        names = {"tied_modules.embed.e.weight": "tied_modules.embed.weight"}
        saved[FIRST]["param_shapes"] = [
            OrderedDict((names.get(name, name), value.shape) for name, value in TRAINED.items())
        ]
        embedding = saved["layer_00-model_states.pt"]
        embedding = {"weight": embedding.pop("e.weight"), **embedding}
        saved |= dict.fromkeys(["layer_00-model_states.pt", *["layer_05-model_states.pt"] * last], embedding)
        return saved | {f"{name}-model_states.pt": {**embedding, **entries} for name, entries in others.items()}

    return files(made)


@pytest.mark.parametrize("last", [True, False])
def test_a_tied_layer_may_call_its_weight_like_others_and_be_in_several_files(last: bool, tmp_path: Path) -> None:
    """``nn.Embedding`` and ``nn.LayerNorm`` both have ``weight``: which of them a layer is was not told apart."""
    tied(last)(tmp_path / "step")
    assert opened(tmp_path / "step").problems == ()
    weight = {"tied_modules.embed.weight": TRAINED["tied_modules.embed.e.weight"]}
    others = {name: value for name, value in {**TRAINED, **BUFFERS}.items() if name != "tied_modules.embed.e.weight"}
    fsdpckpt.convert(tmp_path / "step", tmp_path / "full.pt", only="model")
    written = torch.load(tmp_path / "full.pt")
    assert written.keys() == {*weight, *others}
    assert all(identical(written[name], value) for name, value in {**weight, **others}.items())


def changed(lose: str = "", **contents: Any) -> Make:
    """A maker of ``files``: without some, and with more of the module states or under the names of layers."""

    def made() -> dict[str, Any]:
        saved = {name: content for name, content in one_stage().items() if not lose or lose not in name}
        for name, content in contents.items():
            if name.startswith("layer"):
                saved[f"{name}-model_states.pt"] = content
            else:
                saved[FIRST][name] = content
        return saved

    return files(made)


OF_SECOND_STAGE = [f"zero_pp_rank_{rank}_mp_rank_01_optim_states.pt" for rank in range(RANKS)]
THIRD = {"weight": TRAINED["3.weight"], "bias": torch.zeros(3)}
FROZEN = "layer_04-model_states.pt: cannot tell what the module calls this pipeline layer"
OF_ONE_STAGE = (
    unsupported("tensor-parallel ranks by their names", files(lambda: {**one_stage(),
                "layer_03-model_01-model_states.pt": {"weight": torch.ones(6)}}), "files of pipeline stages",
                omits=("--ignore-file",)),
    unsupported("tensor-parallel ranks as recorded", changed(checkpoint_parallel_dimensions={"pp_degree": 1,
                "tp_degree": 2}), "files of pipeline stages", "found 2 tensor-parallel ranks in each stage"),
    # The number of stages is in each file of module states.
    incomplete("a stage is missing", changed(mp_world_size=2), *OF_SECOND_STAGE, "mp_rank_01_model_states.pt"),
    incomplete("the states of a stage are missing", files(lambda: {**one_stage(), "mp_rank_01_model_states.pt":
               {"module": None}}), *OF_SECOND_STAGE, omits=("- mp_rank_01_model_states.pt",)),
    incomplete("a layer is missing", changed("layer_03"), "2 entries that no file of a layer contains",
               "\n  - 3.weight\n  - 3.bias\n"),
    corrupt("a layer of another shape", changed(layer_03=THIRD), "3.bias has another shape"),
    unsupported("a layer more", changed(layer_04={"frozen": torch.ones(2)}),
                "cannot tell what the module calls this pipeline layer"),
    # A frozen layer, of which nothing is recorded, with the names of the tied one, which is before and after it.
    unsupported("a frozen layer with an entry more", tied(layer_04={"bias": torch.ones(6)}), FROZEN),
    unsupported("a frozen layer of another shape", tied(layer_04={"weight": torch.ones(6)}), FROZEN),
    unsupported("a frozen layer of the same shape", tied(layer_04={"weight": torch.ones(11, 6)}), FROZEN),
    unsupported("layers without ZeRO", changed("optim"), "pipeline stages without the states of ZeRO"),
)  # fmt: skip


NAMES = ["pipeline", "autotp-zero1", "autotp-zero3"]
each = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = (*NAMES, *(f"{name}-universal" for name in NAMES))
    return with_truth(tmp_path_factory.mktemp("parallel"), (GOLDEN / f"{name}.tar.xz" for name in names))


@each
def test_every_value_is_what_deepspeeds_own_program_joins(name: str, runs: Path, tmp_path: Path) -> None:
    """Parameters and states of ``ds_to_universal.py``; frozen ones and buffers as the module had them."""
    truth = torch.load(runs / f"{name}.pt")
    fsdpckpt.convert(str(runs / name), str(tmp_path / "full.pt"))
    state = torch.load(tmp_path / "full.pt")
    assert set(state["model"]) == {*truth["params"], *truth["untrained"]}
    trained = {key: of for key, of in truth["params"].items() if "exp_avg" in of}
    assert set(state["optimizer"]["state"]) == set(trained) == set(truth["params"]) - set(truth["untrained"])
    for key, expected in trained.items():
        assert identical(state["model"][key].flatten(), expected.pop("fp32").flatten()), key
        for moment, value in expected.items():
            assert identical(state["optimizer"]["state"][key][moment].flatten(), value.flatten()), (key, moment)
        assert state["optimizer"]["state"][key]["exp_avg"].shape == state["model"][key].shape
        assert state["optimizer"]["state"][key]["step"] == 3
    for key, value in truth["untrained"].items():
        assert identical(state["model"][key], value.to(state["model"][key].dtype)), key
    matrices, vectors = (group["params"] for group in state["optimizer"]["param_groups"])
    assert sorted([*matrices, *vectors]) == sorted(trained)
    assert {state["model"][key].ndim > 1 for key in matrices} == {True}
    assert {state["model"][key].ndim > 1 for key in vectors} == {False}
    assert state["epoch"] == 3 and "universal_checkpoint_info" not in state


@pytest.mark.parametrize("name", ["autotp-zero1", "autotp-zero3"])
def test_without_maps_the_lists_of_names_say_the_same(name: str, runs: Path, tmp_path: Path) -> None:
    """AutoTP wrote them before it recorded maps, for ``ds_to_universal.py``: frozen weights included."""
    copied = shutil.copytree(runs / name, tmp_path / name)
    for file in copied.rglob("*model_states.pt"):
        content = torch.load(file, weights_only=False)
        content["universal_checkpoint_info"].pop("affine_map")
        torch.save(content, file)
    compared = fsdpckpt.diff(str(copied), str(runs / name))
    assert compared.same, compared
    assert not fsdpckpt.verify(str(copied)).problems


@pytest.mark.parametrize("name", ["autotp-zero1", "autotp-zero3"])
def test_the_universal_checkpoint_of_tensor_parallel_ranks_is_the_same(name: str, runs: Path) -> None:
    """``zero/`` has rank 0's shard of a frozen weight as if it were all of it; the module states have each rank's."""
    compared = fsdpckpt.diff(str(runs / f"{name}-universal"), str(runs / name))
    assert compared.same, compared
    assert not fsdpckpt.verify(str(runs / f"{name}-universal")).problems


def test_the_universal_checkpoint_of_a_pipeline_lacks_what_its_layers_have(runs: Path, tmp_path: Path) -> None:
    found = opened(runs / "pipeline-universal")
    warnings = [note.message for note in found.notes if note.warning]
    assert any("4 buffers of the pipeline" in message and "layer_*" in message for message in warnings)
    copied = shutil.copytree(runs / "pipeline-universal", tmp_path / "universal")
    for file in (runs / "pipeline" / "global_step3").glob("layer_*"):  # as the warning says
        shutil.copy(file, copied)
    compared = fsdpckpt.diff(str(copied), str(runs / "pipeline"))
    assert compared.same and not any(note.kind == "not-carried" for note in opened(copied).notes)


@pytest.mark.parametrize(("name", "kind"), [("pipeline", "pipeline stages"), ("autotp-zero3", "tensor-parallel ranks")])
def test_inspect_says_of_which_ranks_it_is(name: str, kind: str, runs: Path) -> None:
    evidence = [each.message for each in opened(runs / name).ledger.evidence]
    assert any(f"of 4 ranks: 2 data-parallel ranks of 2 {kind}" in message for message in evidence)


# Maps


def strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


Segments = list[tuple[int, list[int] | None]]
"""Of one dimension: each a size and the ranks' widths, None for one that every rank has."""


def by_segments(shape: Sequence[int], dim: int, segments: Segments, ranks: int) -> dict[str, Any]:
    """The map that ``deepspeed.checkpoint.affine`` makes of a weight that is fused of ``segments``."""
    result: dict[str, Any] = {"logical_shape": list(shape), "ranks": {}}
    for rank in range(ranks):
        extent = sum(size if widths is None else widths[rank] for size, widths in segments)
        shard = [extent if axis == dim else size for axis, size in enumerate(shape)]
        pieces, source, dest = [], 0, 0
        for size, widths in segments:
            width = size if widths is None else widths[rank]
            start = source + (0 if widths is None else sum(widths[:rank]))
            pieces.append({
                "shape": [width if axis == dim else size for axis, size in enumerate(shape)],
                "source": [start * strides(shape)[dim], strides(shape)],
                "dest": [dest * strides(shard)[dim], strides(shard)],
                "locations": list(range(ranks)) if widths is None else [rank],
            })  # fmt: skip
            source, dest = source + size, dest + width
        result["ranks"][rank] = {"shard_shape": shard, "pieces": pieces}
    return result


def whole(shape: Sequence[int], ranks: int) -> dict[str, Any]:
    return by_segments(shape, 0, [(shape[0], None)], ranks)


def blocks(shape: Sequence[int], dim: int, of_ranks: Sequence[Sequence[int]], size: int) -> dict[str, Any]:
    """The map of a weight of which each rank has scattered blocks, as CodeGen's and Yuan's."""
    result: dict[str, Any] = {"logical_shape": list(shape), "ranks": {}}
    for rank, numbers in enumerate(of_ranks):
        shard = [size * len(numbers) if axis == dim else extent for axis, extent in enumerate(shape)]
        block = [size if axis == dim else extent for axis, extent in enumerate(shape)]
        result["ranks"][rank] = {
            "shard_shape": shard,
            "pieces": [
                {
                    "shape": block,
                    "source": [number * size * strides(shape)[dim], strides(shape)],
                    "dest": [at * size * strides(shard)[dim], strides(shard)],
                    "locations": [rank],
                }
                for at, number in enumerate(numbers)
            ],
        }
    return result


MAPS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "embed.weight": whole((11, 6), 2),
        "column": by_segments((7, 5), 0, [(7, [4, 3])], 2),
        "row": by_segments((3, 7), 1, [(7, [4, 3])], 2),
        "qkv-fused": by_segments((15, 4), 0, [(7, [4, 3]), (4, [2, 2]), (4, [2, 2])], 2),
        "none": by_segments((1, 5), 0, [(1, [1, 0])], 2),
        "bigcode": by_segments((10, 3), 0, [(7, [4, 3]), (3, None)], 2),  # every rank has the keys and values
        "bigcode.bias": by_segments((10,), 0, [(7, [4, 3]), (3, None)], 2),
        "codegen": blocks((12, 3), 0, [[0, 2, 5], [1, 3, 4]], 2),
        "yuan": blocks((3, 12), 1, [[0, 3], [1, 2]], 3),
        "norm": whole((9,), 2),
    },
    3: {
        "a": by_segments((4, 3, 7), 2, [(7, [3, 3, 1])], 3),
        "shared": by_segments((3, 10), 1, [(7, [3, 0, 4]), (3, None)], 3),
        "b": whole((13,), 3),
        "c": by_segments((8, 2), 0, [(8, [3, 3, 2])], 3),
    },
}


def shards_of(tensor: torch.Tensor, entry: Mapping[str, Any]) -> list[torch.Tensor]:
    """What each rank holds, in the words of ``AffinePiece``: the arguments of ``torch.as_strided``."""
    shards = []
    for of_rank in entry["ranks"].values():
        shard = torch.full((math.prod(of_rank["shard_shape"]),), math.nan)
        for piece in of_rank["pieces"]:
            (source, from_strides), (dest, to_strides) = piece["source"], piece["dest"]
            there = torch.as_strided(shard, piece["shape"], to_strides, dest)
            there.copy_(torch.as_strided(tensor, piece["shape"], from_strides, source))
        shards.append(shard.view(of_rank["shard_shape"]))
    return shards


def parts(tensors: Sequence[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    """ZeRO 1: one flat tensor, cut into equal parts, the padding of the last taken off."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    part = -(-len(flat) // ranks)
    return [flat[rank * part : (rank + 1) * part].clone() for rank in range(ranks)]


def parts_of_each(tensors: Sequence[torch.Tensor], ranks: int) -> list[torch.Tensor]:
    """ZeRO 3: each tensor cut by itself, the last part padded."""
    of_rank: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
    for tensor in tensors:
        part = -(-tensor.numel() // ranks)
        padded = torch.cat([tensor.reshape(-1), torch.zeros(part * ranks - tensor.numel())])
        for rank in range(ranks):
            of_rank[rank].append(padded[rank * part : (rank + 1) * part])
    return [torch.cat(each) for each in of_rank]


class Job:
    """The files of ``model`` tensor-parallel ranks of ``data`` ranks each, and the whole values."""

    def __init__(self, model: int, data: int, stage: int, only: Sequence[str] = ()) -> None:
        maps = {name: entry for name, entry in MAPS[model].items() if not only or name in only}
        self.values = {name: torch.randn(entry["logical_shape"]) for name, entry in maps.items()}
        self.moments = {name: torch.randn_like(value) for name, value in self.values.items()}
        self.frozen = {"frozen.q": torch.randn(5, 7)}
        frozen_map = by_segments((5, 7), 1, [(7, [4, 3] if model == 2 else [2, 2, 3])], model)
        described = {f"^{re.escape(name)}$": entry for name, entry in {**maps, "frozen.q": frozen_map}.items()}
        info = {"universal_checkpoint_version": 0.4, "affine_map": {"version": 1, "params": described}}
        self.files: dict[str, Any] = {}
        for rank in range(model):
            shards = {name: shards_of(self.values[name], entry)[rank] for name, entry in maps.items()}
            moments = [shards_of(self.moments[name], entry)[rank] for name, entry in maps.items()]
            frozen = shards_of(self.frozen["frozen.q"], frozen_map)[rank]
            shapes = OrderedDict((name, shard.shape) for name, shard in shards.items())
            common = {"buffer_names": ["mask"], "param_shapes": [shapes], "shared_params": {"tied": "embed.weight"}}
            common |= {"dp_world_size": data, "mp_world_size": model, "universal_checkpoint_info": info}
            module = {**shards, "frozen.q": frozen, "mask": torch.ones(2), "tied": torch.zeros(1)}
            cut = parts if stage == 1 else parts_of_each
            of_frozen = parts_of_each([frozen], data)
            for at, (weights, exp_avg) in enumerate(
                zip(cut(list(shards.values()), data), cut(moments, data), strict=True)
            ):
                state = {0: {"step": torch.tensor(1.0), "exp_avg": exp_avg}}
                base = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
                name = f"zero_pp_rank_{at}_mp_rank_{rank:02}_optim_states.pt"
                if stage == 1:
                    last = sum(shard.numel() for shard in shards.values()) - at * len(
                        cut(list(shards.values()), data)[0]
                    )
                    padding = max(0, len(cut(list(shards.values()), data)[0]) - last)
                    states = {"base_optimizer_state": base, "single_partition_of_fp32_groups": [weights]}
                    states |= {"zero_stage": 1, "group_paddings": [padding], "partition_count": [data]}
                else:
                    states = {"optimizer_state_dict": base, "fp32_flat_groups": [weights], "partition_count": data}
                    empty = {**dict.fromkeys(module, torch.zeros(0)), "mask": torch.ones(2)}
                    frozen_parts = {"frozen.q": of_frozen[at]}
                    self.files[f"zero_pp_rank_{at}_mp_rank_{rank:02}_model_states.pt"] = {
                        **common,
                        "module": empty,
                        "frozen_param_shapes": {"frozen.q": frozen.shape},
                        "frozen_param_fragments": frozen_parts,
                    }
                self.files[name] = {"optimizer_state_dict": states}
            if stage == 1:
                self.files[f"mp_rank_{rank:02}_model_states.pt"] = {"module": module, **common}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("model", "data"), [(2, 1), (2, 3), (3, 2)])
def test_the_shards_of_every_map_become_whole(model: int, data: int, stage: int, tmp_path: Path) -> None:
    """Replicas that ZeRO cut at other elements on each tensor-parallel rank included."""
    job = Job(model, data, stage)
    save(job.files, tmp_path / "step")
    found = opened(tmp_path / "step")
    first = next(iter(job.values))
    tied = {"tied": job.values["embed.weight"]} if model == 2 else {}
    states = {name: {"step": torch.tensor(1.0), "exp_avg": value} for name, value in job.moments.items()}
    groups = [{"lr": 0.1, "params": list(job.values)}]
    values = {**job.values, **job.frozen, **tied, "mask": torch.ones(2)}
    same_values(found, model=values, optim={"state": states, "param_groups": groups})
    assert found.problems == () and first in found.model.params  # type: ignore[union-attr]
    assert not fsdpckpt.verify(str(tmp_path / "step")).problems
    fsdpckpt.convert(str(tmp_path / "step"), str(tmp_path / "full.pt"), verify="full")


def test_replicas_that_differ_are_a_problem_with_their_place(tmp_path: Path) -> None:
    job = Job(2, 1, 1)
    weights = job.files["zero_pp_rank_0_mp_rank_01_optim_states.pt"]["optimizer_state_dict"]
    weights["single_partition_of_fp32_groups"][0][3] += 1
    save(job.files, tmp_path / "step")
    problems = fsdpckpt.verify(str(tmp_path / "step")).problems
    assert problems and {problem.key for problem in problems} == {"embed.weight", "tied"}, problems


@pytest.mark.parametrize("stage", [1, 3])
def test_random_states_that_a_training_kept_are_of_each_rank(stage: int, tmp_path: Path) -> None:
    """``client_state`` of the ranks with a file of module states."""
    job = Job(2, 2, stage)
    kept = [content for content in job.files.values() if "module" in content]
    for number, content in enumerate(kept):
        content["rng"] = torch.full((4,), float(number))
    save(job.files, tmp_path / "step")
    found = opened(tmp_path / "step")
    assert not fsdpckpt.verify(str(tmp_path / "step")).problems
    assert len([extra for extra in found.rank_extra if extra.get("rng") is not None]) == len(kept)


def run(name: str, *changes: Change, given: str = "") -> Make:
    """A maker of a step that DeepSpeed saved, changed."""
    return packed(GOLDEN / f"{name}.tar.xz", f"{name}/global_step3", *changes, given=given)


def job(*changes: Callable[[dict[str, Any]], object], stage: int = 1, data: int = 1) -> Make:
    """A maker of the files of two tensor-parallel ranks, changed."""

    def contents() -> dict[str, Any]:
        made = Job(2, data, stage).files
        for change in changes:
            change(made)
        return made

    return files(contents)


def told(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], object]:
    """Every file says of its shards what ``change`` makes of it."""

    def change_all(made: dict[str, Any]) -> None:
        holders = [content for content in made.values() if "universal_checkpoint_info" in content]
        info = change(copy.deepcopy(holders[0]["universal_checkpoint_info"]))
        for content in holders:
            content["universal_checkpoint_info"] = info

    return change_all


def column(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    """The map of one weight is another."""

    def changed(info: dict[str, Any]) -> dict[str, Any]:
        change(info["affine_map"]["params"]["^column$"])
        return info

    return told(changed)


def piece(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return column(lambda entry: entry["ranks"][1]["pieces"][0].update(changes))


def without_column(info: dict[str, Any]) -> dict[str, Any]:
    del info["affine_map"]["params"]["^column$"]
    return info


def another_version(made: dict[str, Any]) -> None:
    second = copy.deepcopy(made[SECOND])
    second["universal_checkpoint_info"]["universal_checkpoint_version"] = 0.2
    made[SECOND] = second


def as_saved_by(one: str, other: str) -> str:
    return f"{one}: it was saved as {other}"


FIRST, SECOND = (f"mp_rank_0{rank}_model_states.pt" for rank in range(2))
LAYER_1, LAYER_3 = (f"layer_0{number}-model_states.pt" for number in (1, 3))
ZERO_3 = [f"zero_pp_rank_1_mp_rank_0{rank}_model_states.pt" for rank in range(2)]
STATES = "zero_pp_rank_{}_mp_rank_01_optim_states.pt"
ALONE = "is one part of a DeepSpeed checkpoint of 2"
NO_MAP = ("cannot tell how", "gather them in the job")
NO_PATTERN = "not the name of one parameter"
UNSUPPORTED = {"^column$": "why not"}
OLD = {"universal_checkpoint_version": 0.4}

# What the files say of the shards of a weight, and what of it is refused by the weight's name
MAPS_REFUSED = {
    "multiplied by 0.5": piece(scale=0.5),
    "outside of the shape": piece(source=[25, [5, 1]]),
    "not a block of rows": piece(source=[20, [1, 7]]),
    "not a number of elements": piece(source=[1 << 70, [5, 1]]),
    "not a number of elements: ": piece(source=[-5, [5, 1]]),
    "do not fill a shard": piece(shape=[2, 5]),
    "is not a shape": piece(shape=[1 << 40, 1 << 40]),
    "has no dest": column(lambda entry: entry["ranks"][1]["pieces"][0].pop("dest")),
    "describes the ranks": column(lambda entry: entry["ranks"].pop(1)),
    "not recorded": told(without_column),
    "why not": told(
        lambda _: {"affine_map": {"version": 1, "params": {}}, "autotp_unsupported_parameter_patterns": UNSUPPORTED}
    ),
}
# What the files say instead of maps. Patterns are never matched: a checkpoint could bring one that takes for ever.
NO_MAPS: list[tuple[str, Any]] = [
    ("none in the files", None),
    ("its version is 0.5", {"universal_checkpoint_version": 0.5}),
    (NO_PATTERN, {**OLD, "tp_replicated_parameter_patterns": [r"\d+.norm"]}),
    ("it has parameter_to_average_patterns", {**OLD, "parameter_to_average_patterns": ["^norm$"]}),
    ("have no sub_param", {**OLD, "parameter_with_sub_params": [{"patterns": ["^norm$"], "partition_dim": 0}]}),
    ("version 2", {"affine_map": {"version": 2, "params": {}}}),
    *((NO_PATTERN, {"affine_map": {"version": 1, "params": {key: {}}}}) for key in (".*", r"^layers\d$", "^(a+)+$", 3)),
]
REFUSALS = (
    incomplete("no layer", run("pipeline", lose("layer_*")), "files of a pipeline's layers are missing"),
    incomplete(
        "a buffer that no layer has",
        run("pipeline", edit("layer_04-*", lambda layer: layer.pop("count"))),
        "1 entry that no file of a layer contains\n  - 4.count",
    ),
    # They have equal shapes, and their frozen weights are in no other file.
    corrupt("layers swapped", run("pipeline", swap(LAYER_1, LAYER_3)), as_saved_by(LAYER_1, LAYER_3)),
    corrupt("ranks swapped", run("autotp-zero1", swap(FIRST, SECOND)), as_saved_by(FIRST, SECOND)),
    corrupt("ranks of ZeRO 3 swapped", run("autotp-zero3", swap(*ZERO_3)), as_saved_by(*ZERO_3)),
    # A rank's files are missing: all of them, whose number is in the other files, or the first data-parallel rank's.
    *(
        incomplete(f"a rank of {name} is missing", run(name, lose("*mp_rank_01*")), SECOND, STATES.format(0))
        for name in ("pipeline", "autotp-zero1")
    ),
    incomplete("a rank of ZeRO 3 is missing", run("autotp-zero3", lose("*mp_rank_01*")), STATES.format(0), ZERO_3[1]),
    *(
        incomplete(f"a file of {name} is missing", run(name, lose(f"*{STATES.format(0)}")), STATES.format(0))
        for name in NAMES
    ),
    # One tensor-parallel rank is never the whole: neither with its optimizer's files, nor by its name.
    *(
        incomplete(f"rank {rank} alone", run("autotp-zero1", lose(f"*mp_rank_0{1 - rank}*")),
                   "3 files of the DeepSpeed checkpoint are missing", omits=("--only",))
        for rank in range(2)
    ),
    *(
        incomplete(f"{file} as {given or 'a directory'}", run("autotp-zero1", lose("*optim*", other),
                   move(file, FIRST), given=given), ALONE, only="model")
        for file, other in ((FIRST, SECOND), (SECOND, FIRST))
        for given in (FIRST, "")
    ),
    *(
        unsupported(f"a map: {reason}", job(change, data=2), *NO_MAP, "  - column: ", reason.removesuffix(": "))
        for reason, change in MAPS_REFUSED.items()
    ),
    *(
        unsupported(f"no map: {number}", job(told(lambda _, info=info: info)), "tensor parallel ranks", reason,
                    *(["ds_to_universal"] if info and "affine_map" not in info else []))
        for number, (reason, info) in enumerate(NO_MAPS)
    ),
    corrupt("a rank with other maps", job(another_version), "not that of the first rank"),
    corrupt(
        "a rank with another shape",
        job(lambda made: made[SECOND]["param_shapes"][0].update(norm=torch.Size([8]))),
        "norm has another shape",
    ),
    corrupt(
        "a rank without a parameter",
        job(lambda made: [each.pop("norm") for each in (made[SECOND]["module"], made[SECOND]["param_shapes"][0])]),
        SECOND,
        "it has no norm, which another rank has",
    ),
)  # fmt: skip


@each_of((*REFUSALS, *OF_ONE_STAGE))
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)
