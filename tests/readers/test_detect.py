"""Recognising what is at a path: kinds of files, rank sets, parts side by side, the one checkpoint below."""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.ir.checkpoint import Container, Layout, Section
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.storage import UPLOADING
from tests.makers import GOLDEN, Change, Make, copied, dcp_of, files, lose, put, safetensors, save, together
from tests.oracle.fake_group import as_rank
from tests.readers.contents import opened
from tests.readers.test_missing_sections import verl
from tests.readings import Reading, each_reading
from tests.refusals import (
    Refusal,
    corrupt,
    each_of,
    incomplete,
    missing,
    several,
    unclear,
    unrecognised,
    unsafe,
    unsupported,
)

MODEL = {"l.weight": torch.randn(5, 3), "l.bias": torch.randn(5)}
OPTIM = {
    "state": {0: {"step": torch.tensor(2.0), "exp_avg": torch.randn(5, 3)}, 1: {"exp_avg": torch.randn(5)}},
    "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
}


BOTH = {"model": MODEL, "optimizer": OPTIM}
SLICED = {"state": {0: {"exp_avg": torch.ones(7)}}, "param_groups": [{"params": [0]}]}
SLICES = {"exp_avg": torch.randn(7), "step": torch.tensor(2.0), "seen": 3}
SETTINGS = {"lr": 0.1, "names": ["a", "b"]}
B = torch.ones(2)
CALL = functools.partial(print)
FSDP2 = GOLDEN / "torch-2.4" / "f1_orig_sh_dt"
FSDP2_DCP = torch.load(GOLDEN / "torch-2.4/f1_orig_sh_dt_dcp/truth/full.pt", weights_only=False)
FSDP2_TRUTH = torch.load(FSDP2 / "truth/full.pt", weights_only=False)
AVERAGE = {name: tensor + 1 for name, tensor in MODEL.items()}


def ranks_of(name: str, *sections: str) -> Make:
    """The files of two ranks of FSDP2 under another name."""

    def make(directory: Path) -> None:
        for section in sections or ("model", "optim"):
            for rank in (0, 1):
                shutil.copy(FSDP2 / f"{section}_{rank}.pt", directory / name.format(s=section, r=rank))

    return make


def of_ranks(stem: str, *contents: Any, world: int | None = None) -> dict[str, Any]:
    """One file a rank."""
    return {
        f"{stem}_world_size_{world or len(contents)}_rank_{rank}.pt": content for rank, content in enumerate(contents)
    }


def one_of_one(directory: Path) -> None:
    with as_rank(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        torch.save({"w.w": distribute_tensor(WEIGHT, mesh, [Shard(0)], src_data_rank=None)}, directory / "m.pt")


class Quantized(torch.Tensor):
    """A tensor of a library's own class around another one, as torchao keeps 8-bit states."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Quantized:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    __torch_dispatch__ = classmethod(lambda cls, function, *_: NotImplemented)


def steps(*names: str, above: dict[str, Any] | None = None) -> Make:
    return together(files(above or {}), *(dcp_of(BOTH, at=name) for name in names))


def cut_to(name: str, nbytes: int) -> Change:
    return lambda directory: os.truncate(directory / name, nbytes)


def empty(name: str) -> Change:
    return lambda directory: (directory / name).mkdir()


def named(*names: str) -> str:
    """What the list of candidates says."""
    return "".join(f"\n  - DIR/{name}" for name in names) + "\n"


WHOLE = {"layout": Layout.FULL, "problems": ()}
ONE_FILE = {**WHOLE, "container": Container.TORCH, "world_size": 1}
TRUTH = {
    name: torch.load(GOLDEN / name / "truth/full.pt") for name in ("torch-2.1/f1_flat_full", "torch-2.4/f1_orig_full")
}
IDS = torch.load(GOLDEN / "torch-2.1/f1_flat_full/full_old_rekeyed_ids.pt")
WEIGHT, TABLE = torch.rand(5, 3), {("a", 1): torch.ones(3), ("b", (2, None)): 4}
NORM = torch.nn.LayerNorm(5)
ADAM = torch.optim.Adam(NORM.parameters())
NORM(torch.rand(2, 5)).sum().backward()
ADAM.step()
COLOURED = torch.rand(3)
COLOURED.colour = "red"  # type: ignore[attr-defined]
RANKS = {"layout": Layout.SHARDED, "world_size": 2}
SEEDS = [{"seed": rank} for rank in range(3)]
ACCELERATE = {"pytorch_model_fsdp.bin": MODEL, "optimizer.bin": OPTIM, "scheduler.bin": {"last_epoch": 5}}
STATES = [{"step": 7, "cpu": torch.full((8,), rank, dtype=torch.uint8)} for rank in (0, 1)]
OF_RANKS = [{"lr_scheduler": {"last_epoch": 4}, "rng": {"cpu": torch.arange(64) + rank, "n": rank}} for rank in (0, 1)]
OWN = {"epoch": 2, "loops": {"fit": [1]}, "average": AVERAGE}
FOUND = "the checkpoint was found in DIR/{}"

READINGS = (
    # One file
    Reading("a torch file of any name", files({"x.strange": {**BOTH, "epoch": 3}}, given="x.strange"), MODEL, OPTIM,
            {"epoch": 3}, is_a={**WHOLE, "container": Container.TORCH, "flavor": "plain"}),
    Reading("one numbered file", files({"model_0.pt": {"model": MODEL}}), MODEL),
    *(
        Reading(f"{section} of {name}", copied(GOLDEN / name, given=f"{section}.pt"), is_a=ONE_FILE,
                **{section: truth[section]})
        for name, truth in TRUTH.items()
        for section in ("model", "optim")
    ),
    Reading("integer ids stay integers", copied(GOLDEN / "torch-2.1/f1_flat_full", given="full_old_rekeyed_ids.pt"),
            optim=IDS, is_a=ONE_FILE),
    Reading("vectors are full in one file", files({"o.pt": ADAM.state_dict()}), optim=ADAM.state_dict(), is_a=ONE_FILE),
    Reading("one rank of a world of one", one_of_one, {"w.w": WEIGHT}, is_a={"layout": Layout.SHARDED,
            "world_size": 1}),
    Reading("keys of a table that are tuples", files({"m.pt": {"model": MODEL, "table": TABLE}}), MODEL,
            extra={"table": TABLE}),
    Reading("attributes of a tensor", files({"m.pt": {"w.w": COLOURED}}), {"w.w": COLOURED}, notes=["colour"]),
    Reading("flat parameters", files({"m.pt": {"l.0._flat_param": WEIGHT[0], "buf": WEIGHT[1]}}),
            {"l.0._flat_param": WEIGHT[0], "buf": WEIGHT[1]}, is_a={"layout": Layout.FLATTENED}),
    # Files of ranks
    *(
        Reading(f"ranks by {name}", ranks_of(name), FSDP2_TRUTH["model"], FSDP2_TRUTH["optim"], is_a=RANKS)
        for name in ("{s}_{r}.pt", "{s}_world_size_2_rank_{r}.pt", "pytorch_{s}_fsdp_0_rank{r}.bin", "{s}-rank-{r}.pth")
    ),
    Reading("the rank of an adapter", files({"model.pt": {"model": MODEL}, "lora_rank16.pt": {"r": 16}}), MODEL,
            extra={"lora_rank16": {"r": 16}}),
    Reading("the slices of one rank", files({"optim_rank3.pt": SLICED}), None, {**SLICED},
            problems=[("missing-rank", None)]),
    Reading("extras that differ between ranks", together(ranks_of("{s}_world_size_2_rank_{r}.pt"), files(
            of_ranks("extra_state", *OF_RANKS))), FSDP2_TRUTH["model"], FSDP2_TRUTH["optim"], OF_RANKS[0], OF_RANKS),
    Reading("a key that two parts have", files({
            **of_ranks("model", *({"model": MODEL, "epoch": 1, **seed} for seed in SEEDS[:2])),
            **of_ranks("optim", *({"optimizer": OPTIM, "epoch": 2, "seed": rank + 7} for rank in (0, 1))),
            **of_ranks("extra_state", *({"seed": rank + 9, "optim": "AdamW"} for rank in (0, 1)))}), MODEL, OPTIM,
            ranks=[{"seed": rank + 9, "optim": "AdamW", "model": {"epoch": 1, "seed": rank},
                    "optim_": {"epoch": 2, "seed": rank + 7}} for rank in (0, 1)]),
    Reading("extras of more ranks than the model has", files({
            **of_ranks("model", *({"model": MODEL, **seed} for seed in SEEDS[:2])),
            **{f"random_states_{rank}.pkl": {"cpu": rank} for rank in range(3)}}), MODEL,
            ranks=[{"random_states": {"cpu": rank}, **({"seed": rank} if rank < 2 else {})} for rank in range(3)]),
    # Parts side by side
    Reading("the directories model and optim", copied(GOLDEN / "torch-2.4/f1_orig_sh_dt_dcp"), FSDP2_DCP["model"],
            FSDP2_DCP["optim"], is_a={"container": Container.DCP, "world_size": 2}),
    Reading("accelerate's files", files({**ACCELERATE, "config.json": {}, "random_states_0.pkl": STATES[0],
            "random_states_1.pkl": STATES[1]}), MODEL, OPTIM, ranks=[{"scheduler": {"last_epoch": 5},
            "random_states": state} for state in STATES], is_a={"flavor": "accelerate", "world_size": 1},
            notes=["config.json"]),
    Reading("accelerate's directories", together(dcp_of({"model": MODEL}, at="pytorch_model_fsdp_0"),
            dcp_of({"optimizer": OPTIM}, at="optimizer_0"), files({"scheduler.bin": {"last_epoch": 5}})), MODEL, OPTIM,
            {"scheduler": {"last_epoch": 5}}, is_a={"container": Container.DCP}),
    Reading("Lightning's DCP directory", dcp_of({"model": MODEL, "optimizer_0": OPTIM}, put("meta.pt", OWN)), MODEL,
            OPTIM, OWN, is_a={"flavor": "lightning"}),
    Reading("a neighbour that is refused", files({"model.pt": MODEL, "callbacks.pt": CALL}), MODEL, extra={},
            notes=["callbacks.pt", "functools.partial"], files=["model.pt"]),
    Reading("weights that verl exported", together(ranks_of("{s}_world_size_2_rank_{r}.pt"), safetensors(
            "huggingface/model.safetensors", MODEL)), FSDP2_TRUTH["model"], FSDP2_TRUTH["optim"],
            is_a={"flavor": "verl", "layout": Layout.SHARDED}, notes=["huggingface"]),
    # The only checkpoint below
    *(
        Reading(f"a checkpoint in {below}", files({f"{below}/pytorch_model.pt": {"model": MODEL}, "log.txt": "x"}),
                MODEL, notes=[FOUND.format(below)])
        for below in ("checkpoint-500", "step-10", "a/b", "run/global_step_7/actor")
    ),
    Reading("an older checkpoint below", files({"pytorch_model.bin": MODEL, "checkpoint-500/optimizer.bin": OPTIM}),
            MODEL, notes=["checkpoint-500"]),
    *(
        Reading(f"settings {number} above {below}", steps(below, above={"args.pt": content, "logs/a.pt": SETTINGS}),
                MODEL, OPTIM, {}, notes=[f"{FOUND.format(below)}; not copied from DIR: args.pt"])
        for below in ("step_10", "a/runs/step_10")
        for number, content in enumerate((SETTINGS, {**SETTINGS, "weights": torch.randn(3)}, {"a": {"b": B}}, CALL))
    ),
    Reading("settings beside the checkpoint", files({"args.pt": SETTINGS, "model/model.pt": MODEL}, empty("step_10")),
            MODEL, extra={"args": SETTINGS}, notes=["not treated as parts of this checkpoint: step_10"]),
    Reading("an empty step whose name begins another", files({"step_10/optimizer.pt": OPTIM, "weights/model.pt": MODEL},
            empty("step_1")), MODEL, OPTIM),
    Reading("a link to itself", files({"model.pt": MODEL}, lambda directory: (directory / "loop").symlink_to("loop"),
            given="model.pt"), MODEL),
)  # fmt: skip


@each_reading(READINGS)
def test_it_is_read(reading: Reading, tmp_path: Path) -> None:
    reading.require(tmp_path)


REFUSALS = (
    # One file
    missing("a path that does not exist", files({}, given="absent")),
    unsupported("a torch file of before 1.6", lambda directory: torch.save(MODEL, directory / "old.pt",
                _use_new_zipfile_serialization=False), "next:"),
    unrecognised("an empty file", files({"x.bin": b""}, given="x.bin")),
    unrecognised("a text", files({"x.bin": b"hello, this is some text"}, given="x.bin"), "hello"),
    corrupt("the begin of a zip", files({"x.bin": b"PK\x03\x04 but no zip"}, given="x.bin")),
    unrecognised("a pickle", files({"x.bin": b"\x80\x04}."}, given="x.bin")),
    unrecognised("a lone tensor", files({"t.pt": torch.ones(3)}, given="t.pt"), "not a state dict"),
    incomplete("the file of one rank", copied(FSDP2, given="model_0.pt"), "give the directory with all of them: DIR",
               omits=("run the command again",)),
    incomplete("that of one of two with ShardedTensors", copied(GOLDEN / "torch-2.1/f1_flat_sh_st", given="model_1.pt"),
               "DIR/model_1.pt: 1 of 2 ranks is missing: 0\n"),
    incomplete("that of one of four", copied(GOLDEN / "torch-2.4/f1_hyb_sh_dt", given="optim_1.pt"),
               "DIR/optim_1.pt: 3 of 4 ranks are missing: 0, 2, 3\n"),
    unsupported("a sparse tensor", files({"bad.pt": {"a": torch.eye(2).to_sparse()}}), "DIR/bad.pt", "  - a: "),
    unsafe("a random generator", files({"bad.pt": {"a": torch.Generator()}}), "DIR/bad.pt", "torch._C.Generator"),
    unsafe("a tensor of a class of others", files({"c.pt": {"w": Quantized(torch.zeros(4, dtype=torch.uint8))}}),
           "\n  - " + __name__ + ".Quantized"),
    incomplete("an index of files that are not there", files({"model.safetensors.index.json": {"weight_map": {"w":
               "model-00001-of-00001.safetensors"}}}, given="model.safetensors.index.json"), omits=("each rank",
               "with all of them")),
    # Files of ranks
    incomplete("files of two sets are missing", files({**of_ranks("model", *[B] * 3, world=4),
               **{f"optim_world_size_4_rank_{rank}.pt": B for rank in (1, 3)}}), "\n  - model_world_size_4_rank_3.pt\n"
               "  - optim_world_size_4_rank_0.pt\n  - optim_world_size_4_rank_2.pt\n"),
    incomplete("the last rank of one of two sets", files(dict.fromkeys(("m_rank0.pt", "m_rank1.pt", "o_rank0.pt"), B)),
               "\n  - o_rank1.pt\n"),
    *(
        unclear(f"numbered files that are whole {number}", files({"run_0.pt": content, "run_1.pt": content}),
                "each of these files contains whole tensors")
        for number, content in enumerate(({"model": MODEL}, OPTIM, BOTH))
    ),
    incomplete("slices numbered from 1", files({f"optim_{number}.pt": {**SLICED, "state": {0: SLICES}} for number in
               (1, 2, 3)}), "but those of rank 0 are missing", about={"file": "DIR/optim_0.pt", "rank": 0}),
    several("optimizers numbered from 1", files({f"optim_{number}.pt": OPTIM for number in (1, 2, 3)}), "3 candidates"),
    *(
        several(f"slices as {' and '.join(names)}", files({f"{name}.pt": SLICED for name in names}),
                "2 candidates for the optimizer")
        for names in (("optim_1", "adam_2"), ("optim_1", "optim_3"), ("optim_2", "optim_3"))
    ),
    several("models numbered from 1", files({"model_1.pt": {"model": MODEL}, "model_2.pt": {"model": MODEL,
            "optimizer": SLICED}}), "2 candidates for the model"),
    # Parts side by side
    unsafe("extras of ranks", files({**of_ranks("model", {"a": B}, {"a": B}), **of_ranks("extra_state", {"rng": CALL},
           {"rng": CALL})}), "extra_state"),
    unsafe("a DCP directory", together(files({"model.pt": MODEL}), dcp_of({"optimizer": OPTIM}, put("optim/.metadata",
           pickle.dumps(CALL)), at="optim")), "functools.partial"),
    unsafe("a model", files({"model.pt": {**MODEL, "x": CALL}, "optim.pt": OPTIM}), "functools.partial"),
    unsafe("a model of any name", files({"a.pt": {**MODEL, "x": CALL}}), "functools.partial"),
    several("two models", together(files({"pytorch_model_fsdp.bin": MODEL, "optimizer.bin": OPTIM}), safetensors(
            "merged.safetensors", MODEL)), "\n  - DIR/merged.safetensors", "\n  - DIR/pytorch_model_fsdp.bin"),
    several("consolidated weights beside their shards", together(safetensors("model-00001-of-00001.safetensors", MODEL),
            safetensors("sharded/shard-00001-model-00001-of-00001.safetensors", MODEL))),
    # Several below
    several("two steps", steps("step-10", "step-20"), named("step-10", "step-20")),
    several("two below settings", steps("step_1", "step_10", above={"args.pt": SETTINGS}), named("step_1", "step_10")),
    several("a step below what may be a model", steps("step_10", above={"best.pt": {"weight": B}}),
            named("best.pt", "step_10"), "DIR/best.pt may be a model, or only settings"),
    several("a model and an optimizer of two steps", files({"step-10/model.pt": MODEL, "step-20/optimizer.pt": OPTIM}),
            "contains 2 checkpoints"),
    several("two roles", files({"actor/model.pt": MODEL, "critic/model.pt": MODEL}), named("actor/model.pt",
            "critic/model.pt"), "DIR/actor/model.pt"),
    several("two roles of several files", files({f"{role}/{name}_world_size_1_rank_0.pt": content for role in
            ("actor", "critic") for name, content in (("model", MODEL), ("optim", OPTIM))}), "next: ", "DIR/actor"),
    several("some that cannot be read", files({f"{name}/model.pt": {"model": MODEL} for name in "abd"} | {"c/model.pt":
            {"model": MODEL, "hook": os.getcwd}}, cut_to("d/model.pt", 200)), "contains 4 checkpoints, and 2 of them",
            "\n  - DIR/a/model.pt\n  - DIR/b/model.pt\n  - DIR/c\n  - and 1 more\n", "DIR/d/model.pt: truncated"),
    # No checkpoint, or not yet
    unrecognised("no checkpoint", files({"notes.txt": "x", "sub/x.md": ""}), ".metadata", "notes.txt"),
    incomplete("an interrupted save", dcp_of({"model": MODEL}, lose("model/.metadata"), at="model"), "did not finish"),
    incomplete("an upload that goes on", files({"model.pt": {"model": MODEL}, UPLOADING: ""}), "still being uploaded",
               about={"file": f"DIR/{UPLOADING}"}),
)  # fmt: skip


@each_of(REFUSALS)
def test_it_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    refusal.require(tmp_path)


def test_numbered_files_of_slices_are_those_of_ranks(tmp_path: Path) -> None:
    files(
        {
            f"run_{number}.pt": {**SLICED, "state": {0: {"exp_avg": torch.full((7 - number,), number)}}}
            for number in (0, 1)
        }
    )(tmp_path)
    assert (opened(tmp_path).layout, opened(tmp_path).world_size) == (Layout.FLATTENED, 2)


@pytest.mark.parametrize("name", TRUTH)
def test_the_marks_of_fsdp1_tell_buffers_from_parameters(name: str) -> None:
    model = opened(GOLDEN / name / "model.pt").model
    assert model is not None
    kinds = {key: leaf.sharded for key, leaf in model.params.items() if isinstance(leaf, Tensor)}
    assert kinds == {key: key != "buf" for key in kinds} and "buf" in kinds


def test_the_evidence_says_of_which_file_a_section_is(tmp_path: Path) -> None:
    dcp_of({"model": MODEL, "optimizer_0": OPTIM}, put("meta.pt", OWN))(tmp_path)
    said = {each.message for each in opened(tmp_path).evidence if each.kind == "sections"}
    assert said == {f"{tmp_path}: model and optimizer", f"{tmp_path}/meta.pt: extra entries"}
    assert opened(tmp_path / "meta.pt").model is not None, "alone, it may be read as any file"


def kinds(checkpoint: Any) -> list[str]:
    return [note.kind for note in checkpoint.notes]


def test_ranks_of_which_one_has_no_dict_at_the_top_are_a_problem(tmp_path: Path) -> None:
    for first in ({"a.w": torch.ones(2), "epoch": 1, "d": {}}, {"model": {"a.w": torch.ones(2)}}):
        for rank, content in enumerate((first, [1])):
            save(content, tmp_path / f"model_rank{rank}.pt")
        found = opened(tmp_path)
        assert [(problem.kind, problem.fatal) for problem in found.problems] == [("replica", True)]
        assert found.rank_extra == ()


@pytest.mark.parametrize("more", [{"cpu": 7}, {}])
def test_what_a_rank_lacks_is_not_on_ranks_that_only_other_files_have(tmp_path: Path, more: dict[str, Any]) -> None:
    for rank in (0, 1):
        extras = {"model": MODEL, **({"path": "/a"} if rank == 0 else {})}
        save(extras, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    for rank in (0, 1, 2):
        save({"seed": 7, **({} if rank == 1 else more)}, tmp_path / f"random_states_{rank}.pkl")
    found = opened(tmp_path)
    assert found.extra == {"random_states": {"seed": 7}}
    others = {0: {"path": "/a"}, 1: {}, 2: {}}
    states = [{"seed": 7, **({} if rank == 1 else more)} for rank in others]
    assert list(found.rank_extra) == [
        {**others[rank], "random_states": states[rank]} for rank in (range(3) if more else range(2))
    ]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.5, 0.25, 0.5], ": 0.5 on ranks 0, 2; 0.25 on rank 1"),
        (["x" * 100 + end for end in "abc"], ""),
        ([*range(5)], ": 0 on rank 0; 1 on rank 1; 2 on rank 2; 3 on rank 3; ..."),
        ([0.5, torch.ones(2, 3)], ": 0.5 on rank 0; a tensor float32 [2, 3] on rank 1"),
    ],
)
def test_a_problem_says_which_ranks_have_which_value(values: list[Any], text: str, tmp_path: Path) -> None:
    for rank, value in enumerate(values):
        save(
            {"model": {"w": torch.ones(2)}, "optimizer": {**OPTIM, "param_groups": [{"lr": value, "params": [0, 1]}]}},
            tmp_path / f"model_rank{rank}.pt",
        )
    problems = [problem for problem in opened(tmp_path).problems if problem.kind == "replica"]
    assert [problem.message for problem in problems] == [
        f"optimizer.param_groups.0.lr is not the same on every rank{text}"
    ]
    assert problems[0].section is Section.OPTIM


def test_a_value_of_the_model_that_differs_between_ranks_is_a_problem_of_the_model(tmp_path: Path) -> None:
    for rank in (0, 1):
        save({"model": {**MODEL, "version": rank}, "optimizer": OPTIM}, tmp_path / f"model_rank{rank}.pt")
    found = [(problem.kind, problem.key, problem.section) for problem in opened(tmp_path).problems]
    assert found == [("replica", "model.version", Section.MODEL)]


def test_what_a_trainer_keeps_above_the_folder_of_a_role_is_not_mixed_with_it(tmp_path: Path) -> None:
    (step := tmp_path / "global_step_7").mkdir()
    save({"loader": {"at": 3}}, step / "data.pt")
    verl(step / "actor")
    found = opened(step)
    assert found.flavor == "verl" and found.optim is not None and "data" not in found.extra
    (note,) = [note.message for note in found.notes if note.kind == "found-below"]
    assert note == f"the checkpoint was found in {step}/actor; not copied from {step}: data.pt"
    verl(step / "critic")
    with pytest.raises(NeedsInformationError, match="contains 2 checkpoints") as error:
        opened(step)
    assert set(error.value.details) == {f"{step}/actor", f"{step}/critic"}


def test_the_manifest_tells_key_types_and_what_was_undetermined(tmp_path: Path) -> None:
    optim = {"state": OPTIM["state"]}
    dcp_of({"model": MODEL, "optimizer": optim})(tmp_path)
    assert list(opened(tmp_path).optim.state) == ["0", "1"]  # type: ignore[union-attr]
    manifest = {"program": "fsdpckpt", "version": "9", "key_type": "id", "undetermined": ["l.bias", "gone"]}
    (tmp_path / "fsdpckpt.json").write_text(json.dumps(manifest))
    found = opened(tmp_path)
    assert list(found.optim.state) == [0, 1] and found.flavor == "plain"  # type: ignore[union-attr]
    assert any("fsdpckpt" in str(line) and "9" in str(line) for line in found.evidence)
    leaf = found.model.params["l.bias"]  # type: ignore[union-attr]
    assert isinstance(leaf, Tensor) and leaf.sharded is None
    assert not {"not-carried", "units-unreadable"} & set(kinds(found))
