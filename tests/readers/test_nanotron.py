"""nanotron's files, written as its own code does: weights with their slices in the header, states of each rank."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import fsdpckpt
from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.readers.nanotron import NanotronReader
from fsdpckpt.testing import WEIGHTS, ReaderContract
from tests.oracle.compare import require_identical, require_parts

Slices = tuple[slice, ...]
STAGES, TP = 2, 2
GROUPS = ({"lr": 0.1, "weight_decay": 0.3}, {"lr": 0.1, "weight_decay": 0.0})

# Name, shape, pipeline stage, and the dimension that tensor parallelism cuts with the chunks that are cut one by one.
SHAPES: tuple[tuple[str, tuple[int, ...], int, tuple[int, tuple[int, ...]] | None], ...] = (
    ("model.token_position_embeddings.pp_block.token_embedding.weight", (10, 5), 0, (0, (10,))),
    ("model.decoder.0.pp_block.attn.qkv_proj.weight", (12, 5), 0, (0, (6, 4, 2))),  # queries, keys, values
    ("model.decoder.0.pp_block.attn.o_proj.weight", (5, 6), 0, (1, (6,))),
    ("model.decoder.0.pp_block.input_layernorm.weight", (5,), 0, None),
    ("model.final_layer_norm.pp_block.weight", (5,), 1, None),
    ("model.lm_head.pp_block.weight", (10, 5), 1, (0, (10,))),
)


def text_of(slices: Slices) -> str:
    """``SlicesPair.slice_to_str`` for each dimension."""
    return "|".join(",".join(map(str, (each.start, each.stop, each.step))) for each in slices)


def slices_of(shape: tuple[int, ...], cut: tuple[int, tuple[int, ...]], rank: int) -> list[tuple[Slices, Slices]]:
    """``create_sharded_parameter_from_config``: the local and the global slices of each contiguous chunk."""
    dim, chunks = cut
    found, local, whole = [], 0, 0
    for chunk in chunks:
        size = chunk // TP
        of_rank = [slice(None)] * len(shape)
        of_all = [slice(None)] * len(shape)
        of_rank[dim] = slice(local, local + size)
        of_all[dim] = slice(whole + rank * size, whole + (rank + 1) * size)
        found.append((tuple(of_rank), tuple(of_all)))
        local, whole = local + size, whole + chunk
    return found


class Saved:
    """A model and its optimizer, whole, and what ``serialize.save`` writes of them."""

    def __init__(self, *, zero: int = 0, masters: bool = True) -> None:
        torch.manual_seed(3)
        self.zero, self.keeps_masters = zero, masters
        shapes = {name: shape for name, shape, *_ in SHAPES}
        self.masters = {name: torch.randn(shape) for name, shape in shapes.items()}
        dtype = torch.bfloat16 if masters else torch.float32
        self.model = {name: value.to(dtype) for name, value in self.masters.items()}
        self.states = {
            name: {"step": torch.tensor(7.0), "exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
            for name, shape in shapes.items()
        }

    def local(self, whole: torch.Tensor, name: str, tp: int) -> torch.Tensor:
        """What a tensor-parallel rank has of a tensor of the shape of a parameter."""
        (cut,) = (each[3] for each in SHAPES if each[0] == name)
        if cut is None:
            return whole.clone()
        parts = [whole[of_all] for _, of_all in slices_of(tuple(whole.shape), cut, tp)]
        return torch.cat(parts, dim=cut[0]).contiguous()

    def save(self, path: Path) -> Path:
        (path / "optimizer").mkdir(parents=True)
        for name, shape, pp, cut in SHAPES:
            *folders, last = name.split(".")
            folder = path / "model" / Path(*folders)
            folder.mkdir(parents=True, exist_ok=True)
            if cut is None:
                save_file({"data": self.model[name]}, folder / f"model_{last}.safetensors", metadata={})
            for tp in range(TP) if cut is not None else ():
                metadata = {
                    "version": "1.4",
                    "local_global_slices_pairs": ";".join(
                        f"{text_of(of_rank)}#{text_of(of_all)}" for of_rank, of_all in slices_of(shape, cut, tp)
                    ),
                    "unsharded_shape": str(shape),
                }
                file = folder / f"model_{last}_pp-rank-{pp}-of-{STAGES}_tp-rank-{tp}-of-{TP}.safetensors"
                save_file({"data": self.local(self.model[name], name, tp)}, file, metadata=metadata)
        for pp, tp, dp in product(range(STAGES), range(TP), range(self.zero or 1)):
            of_dp = f"_dp-{dp}-of-{self.zero}" if self.zero else ""
            file = path / "optimizer" / f"optimizer_pp-{pp}-of-{STAGES}{of_dp}_tp-{tp}-of-{TP}_exp-0-of-1.pt"
            torch.save(self.optimizer(pp, tp, dp), file)
        kind = "ZeroDistributedOptimizer" if self.zero else "NamedOptimizer"
        (path / "optimizer" / "optimizer_config.json").write_text(json.dumps({"type": kind}))
        counters = {"version": "1.4", "tp": TP, "dp": self.zero or 1, "metas": {"last_train_step": 7}}
        (path / "checkpoint_metadata.json").write_text(json.dumps(counters))
        (path / "model_config.json").write_text("{}")
        (path / "random").mkdir()
        torch.save({"torch_random_state": torch.get_rng_state()}, path / "random" / "tp-0-of-2_dp-0-of-1_pp-0-of-2.pt")
        (path / "lr_scheduler").mkdir()
        torch.save({"last_epoch": 7}, path / "lr_scheduler" / "lr_scheduler_pp-0-of-2_tp-0-of-2_exp-0-of-1.pt")
        return path

    def optimizer(self, pp: int, tp: int, dp: int) -> dict[str, Any]:
        """``state_dict`` of a rank's optimizer."""

        def held(whole: torch.Tensor, name: str) -> torch.Tensor:
            local = self.local(whole, name, tp)
            if not self.zero or not whole.ndim:
                return local
            start, stop = self.offsets(local.numel())[dp]
            return local.flatten()[start:stop].clone()

        mine = [name for name, _, stage, _ in SHAPES if stage == pp]
        if self.zero:
            mine = [name for name in mine if len(held(self.masters[name], name))]
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in GROUPS]
        for number, name in enumerate(mine):
            groups["norm" in name]["params"].append(number)
        state = {
            number: {key: value if key == "step" else held(value, name) for key, value in self.states[name].items()}
            for number, name in enumerate(mine)
        }
        found = {"state": state, "param_groups": groups, "names": dict(enumerate(mine))}
        if self.keeps_masters:
            found["gradient_accumulator"] = {name: held(self.masters[name], name) for name in mine}
        return found

    def offsets(self, numel: int) -> list[tuple[int, int]]:
        """``ZeroDistributedOptimizer._partition_parameters``."""
        sizes = [(numel - 1) // self.zero + 1] * self.zero
        for rank in range(self.zero - (sizes[0] * self.zero - numel), self.zero):
            sizes[rank] -= 1
        ends = [sum(sizes[: rank + 1]) for rank in range(self.zero)]
        return list(zip([0, *ends[:-1]], ends, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("zero", "masters"), [(0, True), (0, False), (2, True), (4, True), (3, False)])
def test_weights_and_states_of_all_ranks_are_whole_again(zero: int, masters: bool, tmp_path: Path) -> None:
    saved = Saved(zero=zero, masters=masters)
    source = saved.save(tmp_path / "run" / "7")
    inspected = fsdpckpt.inspect(source).checkpoint
    assert (inspected.flavor, inspected.world_size) == ("nanotron", STAGES * TP * (zero or 1))
    assert not fsdpckpt.verify(source).problems
    fsdpckpt.convert(tmp_path / "run", tmp_path / "full.pt", to="full")
    found = torch.load(tmp_path / "full.pt")
    require_identical(found["model"], saved.masters if masters else saved.model)
    require_identical(found["optimizer"]["state"], saved.states)
    groups = found["optimizer"]["param_groups"]
    assert [sorted(group.pop("params")) for group in groups] == [
        sorted(name for name in saved.states if ("norm" in name) is norm) for norm in (False, True)
    ]
    assert groups == list(GROUPS)
    assert found["checkpoint_metadata"]["metas"] == {"last_train_step": 7}


@pytest.mark.filterwarnings("ignore")
def test_it_becomes_a_checkpoint_of_fsdp2_and_its_weights_an_export(tmp_path: Path) -> None:
    saved = Saved(zero=2)
    source = saved.save(tmp_path / "7")
    fsdpckpt.convert(source, tmp_path / "dcp", to="sharded", world_size=3)
    assert fsdpckpt.diff(source, tmp_path / "dcp").same
    fsdpckpt.convert(source, tmp_path / "model.safetensors", only="model", dtype="bfloat16")
    found = load_file(tmp_path / "model.safetensors")
    require_parts(found, saved.model)


def damages() -> Iterator[tuple[str, str, type[Exception], str]]:
    qkv = "model/model/decoder/0/pp_block/attn/qkv_proj/model_weight_pp-rank-0-of-2_tp-rank-1-of-2.safetensors"
    states = "optimizer/optimizer_pp-1-of-2_dp-1-of-2_tp-0-of-2_exp-0-of-1.pt"
    yield qkv, "missing", SourceIncompleteError, "1 file is missing, by the numbers in the other names"
    yield states, "missing", SourceIncompleteError, "1 file is missing, by the numbers in the other names"
    yield qkv, "0,3,None|None,None,None#0,3,2|None,None,None", SourceCorruptError, "does not say which slices"
    yield qkv, "0,3,None|None,None,None#9,99,None|None,None,None", SourceCorruptError, "does not say which slices"
    yield qkv, "0,3,None#0,3,None", SourceCorruptError, "does not say which slices"
    yield qkv, "no slices at all", SourceCorruptError, "does not say which slices"
    yield states, "group", SourceCorruptError, "param group 0 has other settings"
    yield states, "no groups", SourceCorruptError, "it has no param_groups"
    yield states, "a group that is none", SourceCorruptError, "param_groups is no dict"
    yield states, "name", SourceCorruptError, "names"
    yield states, "shape", SourceUnsupportedError, "not split like the weight"
    yield "checkpoint_metadata.json", "[1", SourceCorruptError, "not a JSON object"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "what", "error", "said"), list(damages()))
def test_what_contradicts_the_rest_is_refused(
    name: str, what: str, error: type[Exception], said: str, tmp_path: Path
) -> None:
    file = Saved(zero=2).save(tmp_path / "7") / name
    if what == "missing":
        file.unlink()
    elif name.endswith(".json"):
        file.write_text(what)
    elif name.endswith(".safetensors"):
        shape = {"version": "1.4", "unsharded_shape": "(12, 5)", "local_global_slices_pairs": what}
        save_file(load_file(file), file, metadata=shape)
    else:
        content = torch.load(file)
        if what == "group":
            content["param_groups"][0]["lr"] = 0.7
        elif what == "no groups":
            del content["param_groups"]
        elif what == "a group that is none":
            content["param_groups"][0] = 7
        elif what == "name":
            content["names"].pop(0)
        else:
            content["state"][0]["exp_avg"] = torch.zeros(3)
        torch.save(content, file)
    with pytest.raises(error, match=said):
        fsdpckpt.inspect(tmp_path / "7")
    if name.startswith("optimizer"):
        assert fsdpckpt.convert(tmp_path / "7", tmp_path / "model.pt", only="model", to="full").tensors == len(SHAPES)


@pytest.mark.filterwarnings("ignore")
def test_a_slice_that_two_ranks_have_and_one_that_none_has_are_problems(tmp_path: Path) -> None:
    folder = Saved().save(tmp_path / "7") / "model/model/lm_head/pp_block"
    first, second = (folder / f"model_weight_pp-rank-1-of-2_tp-rank-{tp}-of-2.safetensors" for tp in range(2))
    shutil.copy(first, second)
    problems = fsdpckpt.verify(tmp_path / "7").problems
    assert any("model.lm_head" in str(problem.key or problem.message) for problem in problems), problems


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("form", [torch.tensor, int])
def test_a_step_that_ranks_hold_differently_is_nobodys(tmp_path: Path, zero: int, form: Any) -> None:
    source = Saved(zero=zero).save(tmp_path / "7")
    for file in sorted((source / "optimizer").glob("optimizer_pp-0*.pt")):
        content = torch.load(file)
        for entry in content["state"].values():
            entry["step"] = form(9 if "tp-1" in file.name else 7)
        torch.save(content, file)
    with pytest.raises(SourceCorruptError, match=r"step.*(differ|on another rank)"):
        fsdpckpt.convert(source, tmp_path / "full.pt", to="full")


class TestNanotron(ReaderContract):
    reader = NanotronReader()

    def save(self, directory: Path) -> Path:
        for name, weight in WEIGHTS.items():
            *folders, last = name.split(".")
            (directory / "model" / Path(*folders)).mkdir(parents=True, exist_ok=True)
            file = directory / "model" / Path(*folders) / f"model_{last}"
            for tp, half in enumerate(torch.from_numpy(weight).chunk(2)):
                rows = half.shape[0]
                rest = "|None,None,None" * (half.ndim - 1)
                metadata = {
                    "version": "1.4",
                    "unsharded_shape": str(weight.shape),
                    "local_global_slices_pairs": f"None,None,None{rest}#{tp * rows},{(tp + 1) * rows},None{rest}",
                }
                path = f"{file}_pp-rank-0-of-1_tp-rank-{tp}-of-2.safetensors"
                save_file({"data": half.contiguous()}, path, metadata=metadata)
        (directory / "checkpoint_metadata.json").write_text(json.dumps({"version": "1.4", "tp": 2, "dp": 1}))
        return directory
