"""One fact is changed in one of the places where files state it: ``verify`` and ``convert`` both notice.

Bytes keep their checksums: each file is written anew by the library that made it. What cannot be noticed is in the
table too, with the reason.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

import fsdpckpt
from fsdpckpt.errors import FsdpckptError
from tests.oracle.fake_group import as_rank

SHAPES = {"a.weight": (6, 4), "b.weight": (6, 4), "b.bias": (6,), "head.weight": (5, 6)}
GROUPS = (["a.weight", "b.weight"], ["b.bias", "head.weight"])
DEEPSPEED = Path(__file__).parent.parent / "golden" / "deepspeed" / "zero1-bf16"
VERIFY, CONVERT, BOTH = {"verify"}, {"convert"}, {"verify", "convert"}

Change = Callable[[Any], object]


class Fact(NamedTuple):
    """``form``: which checkpoint; ``place``: the file; ``change``: what is done to its content.

    ``by``: who notices; ``why_not``: why the others cannot.
    """

    form: str
    name: str
    place: str
    change: Change
    by: set[str] = BOTH
    why_not: str = ""


def values() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    model = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    state = {
        name: {
            "step": torch.tensor(3.0),
            "exp_avg": torch.randn(shape, generator=generator),
            "exp_avg_sq": torch.rand(shape, generator=generator),
        }
        for name, shape in SHAPES.items()
    }
    groups = [{"lr": 0.1, "params": list(names)} for names in GROUPS]
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}}


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small checkpoint of each container and layout, without what ``fsdpckpt.json`` says of their files."""
    place = tmp_path_factory.mktemp("forms")
    (place / "full").mkdir()
    torch.save(values(), place / "full" / "full.pt")
    full = place / "full" / "full.pt"
    sharded: dict[str, Any] = {"to": "sharded", "world_size": 2, "buffers": ["none"]}
    fsdpckpt.convert(full, place / "dcp", **sharded)
    fsdpckpt.convert(full, place / "ranks", container="torch", key_type="id", **sharded)
    fsdpckpt.convert(full, place / "flat", to="flattened", world_size=2, unit=["none"], use_orig_params=True)
    (place / "st").mkdir()
    fsdpckpt.convert(full, place / "st" / "full.safetensors")
    (place / "hf").mkdir()
    named = {f"model.layers.{at}.mlp.up_proj.weight": torch.rand(8, 4) for at in range(2)}
    named["model.embed_tokens.weight"] = torch.rand(9, 4)
    for number, (name, tensor) in enumerate(named.items(), 1):
        save_file({name: tensor}, place / "hf" / f"model-{number:05d}-of-00003.safetensors")
    shards = {name: f"model-{number:05d}-of-00003.safetensors" for number, name in enumerate(named, 1)}
    (place / "hf" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    config = {"vocab_size": 9, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2}
    (place / "hf" / "config.json").write_text(json.dumps(config))
    _add_forms_of_trainers(place)
    for form in ("dcp", "ranks", "flat"):
        manifest = place / form / "fsdpckpt.json"
        document = json.loads(manifest.read_text())
        manifest.unlink()
        if form == "flat":  # which cannot be read without its units
            (place / form / "units.json").write_text(json.dumps(document["units"]))
    return place


def _add_forms_of_trainers(place: Path) -> None:
    """Masters in a wrapper, as apex saves them; several models; a full file of Lightning; a step of DeepSpeed."""
    content = values()
    trained = [name for names in GROUPS for name in names]
    by_id = {number: content["optimizer"]["state"][name] for number, name in enumerate(trained)}
    numbers = iter(range(len(trained)))
    groups = [{"lr": 0.1, "params": [next(numbers) for _ in names]} for names in GROUPS]
    ids = {"state": by_id, "param_groups": groups}
    model = {name: content["model"][name] for name in trained}
    lists = [[model[name].clone() for name in names] for names in GROUPS]
    wrapper = {"optimizer_state_dict": ids, "fp32_from_fp16": lists}
    halves = {name: leaf.bfloat16() for name, leaf in model.items()}
    for form in ("masters", "several", "lightning"):
        (place / form).mkdir()
    torch.save({"model": halves, "optimizer": wrapper}, place / "masters" / "full.pt")
    second = {"x": torch.ones(3, 2), "y": torch.ones(4)}
    other = {"model": second, "optimizer": named_optimizer(second)}
    torch.save({"actor": content, "critic": other}, place / "several" / "full.pt")
    lightning = {"state_dict": model, "optimizer_states": [ids], "pytorch-lightning_version": "2.6.0"}
    torch.save(lightning, place / "lightning" / "own.ckpt")
    zero = shutil.copytree(DEEPSPEED, place / "zero")
    (zero / "truth.pt").unlink()


def named_optimizer(model: dict[str, Any]) -> dict[str, Any]:
    state = {name: {"step": torch.tensor(3.0), "exp_avg": torch.rand_like(leaf)} for name, leaf in model.items()}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(model)}]}


def changed(path: Path, change: Change) -> None:
    """Apply ``change`` to what the file at ``path`` holds, and save it again."""
    if path.suffix in (".pt", ".ckpt"):
        of_rank = re.search(r"_rank_(\d+)$", path.stem)
        rank = int(of_rank[1]) if of_rank else 0
        with as_rank(rank, 2):
            content = torch.load(path, weights_only=False)
            change(content)
            torch.save(content, path)
    elif path.name == ".metadata":
        content = pickle.loads(path.read_bytes())
        change(content)
        path.write_bytes(pickle.dumps(content))
    elif path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
        change(tensors)
        save_file(tensors, path, metadata)
    else:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))


def at(*keys: Any) -> Callable[[Any], Any]:
    def find(content: Any) -> Any:
        for key in keys:
            content = content[key]
        return content

    return find


def less_rows(*keys: Any) -> Change:
    """Drop the last row of a tensor."""

    def change(content: Any) -> None:
        parent = at(*keys[:-1])(content)
        tensor = parent[keys[-1]]
        if isinstance(tensor, DTensor):
            local = tensor.to_local()[:-1].clone()
            shape = torch.Size((tensor.shape[0] - 2, *tensor.shape[1:]))
            parent[keys[-1]] = DTensor.from_local(
                local, tensor.device_mesh, tensor.placements, run_check=False, shape=shape, stride=tensor.stride()
            )
        else:
            parent[keys[-1]] = tensor[:-1].clone()

    return change


def renamed(*keys: Any, to: str) -> Change:
    def change(content: Any) -> None:
        parent = at(*keys[:-1])(content)
        parent[to] = parent.pop(keys[-1])

    return change


def dropped(*keys: Any) -> Change:
    return lambda content: at(*keys[:-1])(content).pop(keys[-1])


def replaced(*keys: Any, by: Any) -> Change:
    return lambda content: at(*keys[:-1])(content).__setitem__(keys[-1], by)


def swapped(*keys: Any) -> Change:
    return lambda content: at(*keys)(content).reverse()


def smaller(key: str) -> Change:
    """The global shape that DCP records, without its last row."""

    def change(metadata: Any) -> None:
        one = metadata.state_dict_metadata[key]
        one.size = torch.Size((one.size[0] - 1, *one.size[1:]))

    return change


def shorter_shard(content: Any) -> None:
    """A flat parameter's shard on this rank, without its last element."""
    (shard,) = content["_flat_param"].local_shards()
    shard.tensor = shard.tensor[:-1].clone()


def added(*keys: Any) -> Change:
    """Another value of each element."""
    return lambda content: at(*keys)(content).add_(1)


WRAPPED = "_fsdp_wrapped_module"
STEP = "global_step3/mp_rank_00_model_states.pt"
MODEL, OPTIM = "model_world_size_2_rank_{}.pt", "optim_world_size_2_rank_{}.pt"
FACTS = [
    # One torch.save file, optimizer by name: a shape stands in the parameter and in each state, a name in the model,
    # the states and the groups, and the order of a group nowhere else.
    Fact("full", "shape of a parameter", "full.pt", less_rows("model", "a.weight")),
    Fact("full", "shape of a state", "full.pt", less_rows("optimizer", "state", "b.bias", "exp_avg")),
    Fact("full", "name in the model", "full.pt", renamed("model", "a.weight", to="z.weight")),
    Fact("full", "name in the states", "full.pt", renamed("optimizer", "state", "a.weight", to="z.weight")),
    Fact("full", "name in a group", "full.pt", replaced("optimizer", "param_groups", 0, "params", 0, by="z.weight")),
    Fact("full", "a group less", "full.pt", dropped("optimizer", "param_groups", 1)),
    Fact("full", "a parameter less", "full.pt", dropped("model", "head.weight")),
    Fact("full", "a parameter without states", "full.pt", dropped("optimizer", "state", "a.weight")),
    Fact("full", "a state less", "full.pt", dropped("optimizer", "state", "a.weight", "exp_avg_sq"), set(), "two "
         "matrices are too few to say that one lacks a state: others have states of their own"),
    Fact("full", "a step", "full.pt", replaced("optimizer", "state", "a.weight", "step", by=torch.tensor(4.0)), VERIFY,
         "a conversion reads no values, and copies this one as it is"),
    Fact("full", "order of a group", "full.pt", swapped("optimizer", "param_groups", 0, "params"), set(),
         "names lead to the right states in any order"),
    Fact("full", "a learning rate", "full.pt", replaced("optimizer", "param_groups", 0, "lr", by=7.0), set(),
         "it stands in one place"),
    Fact("full", "a dtype", "full.pt", lambda c: c["model"].update({"a.weight": c["model"]["a.weight"].half()}), set(),
         "weights and states may have different types"),
    # Rank files of DTensors, optimizer by id: each rank states names, shapes, ids, groups and the mesh.
    Fact("ranks", "shape on one rank", MODEL.format(1), less_rows("a.weight")),
    Fact("ranks", "shape of a state on one rank", OPTIM.format(0), less_rows("state", 0, "exp_avg")),
    Fact("ranks", "name on one rank", MODEL.format(1), renamed("a.weight", to="z.weight")),
    Fact("ranks", "a parameter less on one rank", MODEL.format(0), dropped("b.bias")),
    Fact("ranks", "an id on one rank", OPTIM.format(1), renamed("state", 0, to=9)),
    Fact("ranks", "a state less on one rank", OPTIM.format(1), dropped("state", 0, "exp_avg")),
    Fact("ranks", "a group less on one rank", OPTIM.format(1), dropped("param_groups", 1)),
    Fact("ranks", "order of a group on one rank", OPTIM.format(1), swapped("param_groups", 0, "params")),
    Fact("ranks", "a learning rate on one rank", OPTIM.format(1), replaced("param_groups", 0, "lr", by=7.0)),
    Fact("ranks", "a step on one rank", OPTIM.format(1), replaced("state", 0, "step", by=torch.tensor(4.0))),
    Fact("ranks", "a file less", OPTIM.format(1), Path.unlink),
    Fact("ranks", "a file of the other rank", MODEL.format(1),
         lambda path: shutil.copy(path.with_name(MODEL.format(0)), path)),
    # A DCP directory: the global shape and the chunks in .metadata, the bytes in files.
    Fact("dcp", "shape of a parameter", ".metadata", smaller("model.a.weight")),
    Fact("dcp", "shape of a state", ".metadata", smaller("optimizer.state.a.weight.exp_avg")),
    Fact("dcp", "a chunk less", ".metadata", lambda m: m.state_dict_metadata["model.a.weight"].chunks.pop()),
    Fact("dcp", "an item less", ".metadata", lambda m: m.storage_data.pop(next(iter(m.storage_data)))),
    Fact("dcp", "a parameter less", ".metadata", lambda m: m.state_dict_metadata.pop("model.b.bias")),
    Fact("dcp", "a file less", "__1_0.distcp", Path.unlink),
    # safetensors of this program: the header says which states there are.
    Fact("st", "shape of a parameter", "full.safetensors", less_rows("model.a.weight")),
    Fact("st", "a parameter less", "full.safetensors", dropped("model.a.weight")),
    Fact("st", "a state less", "full.safetensors", dropped("optimizer.state.a.weight.exp_avg")),
    # Hugging Face's shards: the index and the shards state the names, config.json the sizes.
    Fact("hf", "shape of a weight", "model-00001-of-00003.safetensors", less_rows("model.layers.0.mlp.up_proj.weight"),
         set(), "config.json is compared only where all layers agree, as some models have layers of their own sizes"),
    Fact("hf", "shape of the only embedding", "model-00003-of-00003.safetensors",
         lambda c: c.update({"model.embed_tokens.weight": c["model.embed_tokens.weight"][:, :2].clone()})),
    Fact("hf", "rows of the vocabulary", "model-00003-of-00003.safetensors", less_rows("model.embed_tokens.weight"),
         set(), "a vocabulary may have been resized after config.json was written"),
    Fact("hf", "name in a shard", "model-00002-of-00003.safetensors",
         renamed("model.layers.1.mlp.up_proj.weight", to="z")),
    Fact("hf", "name in the index", "model.safetensors.index.json",
         renamed("weight_map", "model.layers.1.mlp.up_proj.weight", to="z")),
    Fact("hf", "number of layers", "config.json", replaced("num_hidden_layers", by=3)),
    Fact("hf", "a shard less", "model-00002-of-00003.safetensors", Path.unlink),
    # Flat parameters: each rank's lengths, and names, shapes and order in the units file.
    Fact("flat", "length on one rank", MODEL.format(0), shorter_shard),
    Fact("flat", "length of a state", OPTIM.format(0), less_rows("state", f"{WRAPPED}.a.weight", "exp_avg")),
    Fact("flat", "shape in the units", "units.json", replaced("units", 0, "params", 0, "shape", by=[6, 5])),
    Fact("flat", "a file less", OPTIM.format(0), Path.unlink),
    # A wrapper of apex: the masters in lists without names, the model's copies, and the ids of the optimizer.
    Fact("masters", "value of a copy", "full.pt", added("model", "b.bias")),
    Fact("masters", "value of a master", "full.pt", added("optimizer", "fp32_from_fp16", 0, 0)),
    Fact("masters", "shape of a master", "full.pt", less_rows("optimizer", "fp32_from_fp16", 1, 0)),
    Fact("masters", "a master less", "full.pt", dropped("optimizer", "fp32_from_fp16", 1, 0)),
    Fact("masters", "order of the masters", "full.pt", swapped("optimizer", "fp32_from_fp16", 0), set(), "their values "
         "say which parameter each is, and so which parameter each id is"),
    # Several models: each has names, shapes and groups of its own.
    Fact("several", "shape of a state of another model", "full.pt",
         less_rows("critic", "optimizer", "state", "x", "exp_avg")),
    Fact("several", "name in a group of another model", "full.pt",
         replaced("critic", "optimizer", "param_groups", 0, "params", 0, by="z")),
    Fact("several", "a parameter less in another model", "full.pt", dropped("critic", "model", "x")),
    Fact("several", "a parameter less in the first model", "full.pt", dropped("actor", "model", "head.weight")),
    Fact("several", "name in the first model", "full.pt", renamed("actor", "model", "a.weight", to="z.weight")),
    Fact("several", "a group less in the first model", "full.pt",
         dropped("actor", "optimizer", "param_groups", 1)),
    # A full file of Lightning: ids are places in the model.
    Fact("lightning", "an id in a group", "own.ckpt",
         replaced("optimizer_states", 0, "param_groups", 1, "params", 1, by=9)),
    Fact("lightning", "an id in two groups", "own.ckpt",
         replaced("optimizer_states", 0, "param_groups", 1, "params", 0, by=0)),
    Fact("lightning", "a parameter less", "own.ckpt", dropped("state_dict", "head.weight")),
    # A step of DeepSpeed: names, shapes and the step in the module states, masters and the step on each rank.
    Fact("zero", "value of a weight", STEP, lambda c: next(iter(c["module"].values())).add_(1)),
    Fact("zero", "a weight less", STEP, lambda c: c["module"].pop(next(iter(c["module"])))),
    Fact("zero", "shape of a parameter", STEP, lambda c: c["param_shapes"][0].update(
        {next(iter(c["param_shapes"][0])): torch.Size([2, 3])})),
    Fact("zero", "a parameter less", STEP, lambda c: c["param_shapes"][0].popitem()),
    Fact("zero", "number of ranks", STEP, replaced("dp_world_size", by=4)),
    Fact("zero", "the step", STEP, replaced("global_steps", by=7), set(), "only this file states it"),
]  # fmt: skip


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact.form}: {fact.name}")
def test_a_fact_that_is_changed_in_one_place_is_noticed(fact: Fact, forms: Path, tmp_path: Path) -> None:
    source = shutil.copytree(forms / fact.form, tmp_path / fact.form)
    path = source / fact.place
    if fact.change is Path.unlink or "other rank" in fact.name:
        fact.change(path)
    else:
        changed(path, fact.change)
    noticed = {"verify"} if set(_said_by_verify(source)) else set()
    noticed |= {"convert"} if set(_said_by_convert(source, tmp_path / "out")) else set()
    assert noticed == fact.by, fact.why_not
    assert bool(fact.why_not) is (fact.by != BOTH)


def test_nothing_is_said_of_what_is_unchanged(forms: Path, tmp_path: Path) -> None:
    for form in ("full", "ranks", "dcp", "st", "hf", "flat", "masters", "several", "lightning", "zero"):
        assert not list(_said_by_verify(forms / form)), form
        assert not list(_said_by_convert(forms / form, tmp_path / form)), form


def _said_by_verify(source: Path) -> Iterator[str]:
    try:
        result = fsdpckpt.verify(source)
    except FsdpckptError as error:
        yield str(error)
        return
    yield from (problem.message for problem in result.problems)
    yield from (note for note in result.notes if "none of the model's" in note)


def _said_by_convert(source: Path, target: Path) -> Iterator[str]:
    try:
        report = fsdpckpt.convert(source, target, to="sharded", world_size=3, container="dcp", buffers=["none"])
    except FsdpckptError as error:
        assert error.exit_code in (3, 4)
        yield str(error)
        return
    noted = [note for note in report.notes if note.warning or note.kind in ("unmatched", "missing-state")]
    yield from (note.message for note in noted if "the target has no" not in note.message)  # schedulers, loops
