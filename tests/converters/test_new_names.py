"""A new name is in force wherever a name stands: keys, groups, ``param_names`` and recorded facts. Others stay."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, UsageError
from tests.converters.jobs import RANK_FILES, Job, converted, notes, recorded, refused, save, states
from tests.oracle.compare import require_identical

WRAPPERS = re.compile(r"(?:(?:module|_orig_mod|_checkpoint_wrapped_module)\.)*")
Changes = Mapping[str, "str | None"]
"""What names without wrappers begin with, before and after; None: it is left out."""


class Model(nn.Module):
    """The buffer comes first, and three parameters have one shape."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("rope", torch.ones(3, 3))
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3, bias=False)
        self.last = nn.Linear(3, 3, bias=False)


PARAMETERS = [name for name, _ in Model().named_parameters()]


def changed(name: str, changes: Changes) -> str | None:
    lead = WRAPPERS.match(name)[0]
    for old, new in changes.items():
        if name.startswith(lead + old):
            return None if new is None else lead + new + name.removeprefix(lead + old)
    return name


def require_changed(written: Any, saved: Mapping[str, Any], changes: Changes) -> None:
    """Each section is what ``saved`` has, with the names changed, in its order; ids stay what they are."""

    def each(names: Any) -> list[Any]:
        found = [changed(name, changes) if isinstance(name, str) else name for name in names]
        return [name for name in found if name is not None]

    def entries(content: Mapping[Any, Any]) -> dict[Any, Any]:
        return {each([name])[0]: value for name, value in content.items() if each([name])}

    assert written.keys() == saved.keys()
    for section, content in saved.items():
        expected = entries(content)
        if "param_groups" in content:
            groups = [
                {**group, **{key: each(group[key]) for key in ("params", "param_names") if key in group}}
                for group in content["param_groups"]
            ]
            expected = {"state": entries(content["state"]), "param_groups": groups}
        assert list(written[section]) == list(expected)
        if "state" in expected:
            assert list(written[section]["state"]) == list(expected["state"])
        require_identical(written[section], expected, section)


def wrapped(model: Mapping[str, Any], lead: str) -> dict[str, Any]:
    return {lead + name: leaf for name, leaf in model.items()}


# What names a parameter in both sections

SPELLINGS = {
    "a compiled model": ("_orig_mod.", ""),
    "a compiled model's optimizer": ("", "_orig_mod."),
    "a model in DistributedDataParallel": ("module.", ""),
    "its optimizer": ("", "module."),
    "both": ("module._orig_mod.", "_orig_mod."),
    "another wrapper": ("", "_checkpoint_wrapped_module."),
}


@pytest.mark.parametrize("how", SPELLINGS)
@pytest.mark.parametrize("spelled", ["the model's", "the optimizer's", "plain"])
def test_a_parameter_that_two_sections_spell_differently_is_renamed_in_both(how: str, spelled: str) -> None:
    """A rule may have any of the names that ``inspect`` shows, or that without wrappers."""
    in_model, in_optim = SPELLINGS[how]
    model = Model()
    model.body.register_buffer("scale", torch.ones(3))  # which the optimizer does not spell at all
    job = Job(model)
    saved = {"model": wrapped(job.model, in_model), "optimizer": job.named(in_optim)}
    lead = {"the model's": in_model, "the optimizer's": in_optim, "plain": ""}[spelled]
    rename = {f"{lead}body": f"{lead}trunk.body", f"{lead}head.weight": f"{lead}lm.weight"}
    written = converted(save(saved), "b.pt", rename=rename)
    require_changed(written, saved, {"body.": "trunk.body.", "head.": "lm."})


RULES: dict[str, tuple[dict[str, Any], Changes]] = {
    "a rule with module.": ({"rename": {"module.body": "module.trunk"}}, {"body": "trunk"}),
    "a rule without": ({"rename": {"body": "trunk"}}, {"body": "trunk"}),
    "one parameter": ({"rename": {"module.last.weight": "module.tail"}}, {"last.weight": "tail"}),
    "a prefix": ({"add_prefix": "net."}, {"": "net."}),
    "include with module.": ({"include": ["module.body.*"]}, {"head": None, "last": None, "rope": None}),
    "exclude with module.": ({"exclude": ["module.body.*"]}, {"body": None}),
}


@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize("kept_in", ["two optimizers", "two numbered optimizers", "one model"])
def test_a_rule_as_one_section_spells_names_is_in_force_in_all(kept_in: str, how: str) -> None:
    """The models have plain names, and the optimizers those of DistributedDataParallel."""
    options, changes = RULES[how]
    saved: dict[str, Any] = {}
    for seed, name in enumerate(("model",) if kept_in == "one model" else ("actor", "critic")):
        job = Job(Model(seed))
        key = "optimizer" if name == "model" else f"optim{seed}" if "numbered" in kept_in else f"{name}_optimizer"
        saved |= {name: job.model, key: job.named("module.")}
    require_changed(converted(save(saved), "b.pt", **options), saved, changes)


def test_each_of_two_compiled_models_is_renamed_with_its_optimizer() -> None:
    jobs = {"actor": Job(Model(0)), "critic": Job(Model(1), words="")}
    saved = {name: wrapped(job.model, "_orig_mod.") for name, job in jobs.items()}
    saved |= {f"{name}_optimizer": job.ids for name, job in jobs.items()}
    require_changed(converted(save(saved), "b.pt", rename={"head": "lm"}), saved, {"head": "lm"})


@pytest.mark.parametrize("in_words", ["", "module."])
@pytest.mark.parametrize("in_model", ["", "module."])
@pytest.mark.parametrize("names", [("actor", "critic"), ("model",)])
def test_named_parameters_from_before_or_after_distributed_data_parallel(
    in_model: str, in_words: str, names: tuple[str, ...]
) -> None:
    """The optimizer has the names of one of both, the model those of the other; globs and rules have either."""
    saved: dict[str, Any] = {}
    truth: dict[str, Any] = {}
    for seed, name in enumerate(names):
        job = Job(Model(seed), [PARAMETERS[::-1]], words=in_words)
        key = "optimizer" if name == "model" else f"{name}_optimizer"
        saved |= {name: wrapped(job.model, in_model), key: job.ids}
        truth |= {name: saved[name], key: job.named(in_model)}
    options = {"rename": {"body": "trunk"}, "exclude": ["head.*"]}
    written = converted(save(saved), "b.pt", key_type="name", **options)
    for content in (written, truth):
        for group in chain(*(part.get("param_groups", ()) for part in content.values())):
            del group["param_names"]
    require_changed(written, truth, {"body": "trunk", "head": None})


def test_the_name_of_a_peft_adapter_stays_where_it_is() -> None:
    """PEFT's model section has no ``default``, and the optimizer has the live model's names."""
    in_optim = [f"layers.{n}.lora_{part}.default.weight" for n in range(2) for part in "AB"]
    job = Job({name: (2, 3 + at) for at, name in enumerate(in_optim)})
    weights = {name.replace(".default", ""): leaf for name, leaf in job.model.items()}
    saved = {"model": weights, "optimizer": job.named()}
    rename = {"layers.0.lora_A.weight": "layers.0.lora_C.weight", "layers.1": "blocks.1"}
    changes = {"layers.0.lora_A": "layers.0.lora_C", "layers.1": "blocks.1"}
    require_changed(converted(save(saved), "b.pt", rename=rename), saved, changes)


@pytest.mark.parametrize("lead", ["", "_orig_mod."])
def test_param_names_beside_ids_have_the_new_names_and_name_the_right_states(lead: str) -> None:
    groups = [["last.weight", "head.weight"], ["body.weight", "body.bias"]]
    job = Job(Model(), groups, words=lead)
    saved = job.saved(lead=lead)
    written = converted(save(saved), "new.pt", rename={f"{lead}head": f"{lead}out"})
    require_changed(written, saved, {"head": "out"})
    named = states(converted("new.pt", "names.pt", key_type="name"))
    require_identical(named, {changed(name, {"head": "out"}): one for name, one in job.named(lead)["state"].items()})


def test_an_optimizer_alone_is_renamed_by_its_param_names_with_and_without_wrappers() -> None:
    job = Job(Model(), words="_orig_mod.")
    (group,) = converted(save(job.ids), "a.pt", only="optim", add_prefix="net.")["param_groups"]
    assert group["param_names"] == [f"_orig_mod.net.{name}" for name in PARAMETERS]
    rename = {"head": "lm", "_orig_mod.last": "_orig_mod.end"}
    (group,) = converted("source.pt", "b.pt", only="optim", rename=rename)["param_groups"]
    assert group["param_names"] == [changed(f"_orig_mod.{n}", {"head": "lm", "last": "end"}) for n in PARAMETERS]


def test_the_module_that_only_the_optimizer_names_can_be_stripped() -> None:
    job = Job(Model())
    saved = {"model": job.model, "optimizer": job.named("module.")}
    written = converted(save(saved), "b.pt", strip_prefix="module.")
    assert list(written["model"]) == list(saved["model"]) and list(states(written)) == PARAMETERS
    refused(UsageError, "would both be named", "source.pt", "c.pt", rename={"module.last": "head"})


def test_a_module_called_module_is_not_the_wrapper() -> None:
    model = nn.ModuleDict({"module": nn.Linear(3, 3), "weight": nn.Linear(3, 2)}).state_dict()
    written = converted(save({"actor": model, "critic": model}), "b.pt", rename={"module": "body"})
    assert list(written["actor"]) == ["body.weight", "body.bias", "weight.weight", "weight.bias"]


# What may be a buffer

RENAMES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no rename": ({}, "rope", "*.weight"),
    "a prefix": ({"add_prefix": "net."}, "net.rope", "net.body"),
    "the buffer": ({"rename": {"rope": "freqs"}}, "freqs", "body"),
    "a prefix less": ({"strip_prefix": "ema.", "add_prefix": "x."}, "x.rope", "x.body"),
}


@pytest.mark.parametrize("how", RENAMES)
def test_a_buffer_that_nothing_tells_apart_is_still_a_question_after_a_rename(how: str) -> None:
    options, buffer, unit = RENAMES[how]
    save(Job(Model()).saved(lead=options.get("strip_prefix", "")))
    fsdpckpt.convert("source.pt", "dcp", to="sharded", world_size=2, container="dcp", **options)
    written = recorded("dcp")
    assert written["undetermined"][0] == buffer
    assert any(note["kind"] == "undetermined" and buffer in note["message"] for note in written["notes"])
    for target in (RANK_FILES, {"to": "flattened", "unit": unit, "use_orig_params": True}):
        refused(NeedsInformationError, "", "dcp", "again", world_size=2, **target)


def test_a_placements_rule_cuts_what_is_undetermined_under_its_new_name() -> None:
    model = Model().state_dict()
    Path("rules.json").write_text(json.dumps({"net.*": {"tp": "Shard(0)"}}))
    cut = {"to": "sharded", "container": "dcp", "mesh": "tp=3", "placements": "rules.json"}
    fsdpckpt.convert(save(model), "dcp", add_prefix="net.", **cut)
    assert recorded("dcp")["undetermined"] == [f"net.{name}" for name in model]


# Names that stay, in models that torch compiled and in DCP directories


def compiled(**settings: Any) -> tuple[Job, dict[str, Any]]:
    """What ``source.pt`` holds: a compiled model, with its optimizer by id."""
    model = Model(1)
    job = Job(model, **settings)
    saved = {"model": torch.compile(model).state_dict(), "optimizer": job.ids}
    save(saved)
    return job, saved


def test_a_compiled_model_loads_what_was_made_of_its_checkpoint_and_its_optimizer_gets_its_names() -> None:
    _, saved = compiled()
    fsdpckpt.convert("source.pt", "dcp", to="sharded", world_size=3)
    assert fsdpckpt.diff("source.pt", "dcp").same
    back = converted("dcp", "back.pt")["model"]
    require_identical(dict(back), dict(saved["model"]))
    torch.compile(Model(2)).load_state_dict(back)
    saved["optimizer"]["state"]["custom"] = {"ema": torch.ones(2)}
    named = converted(save(saved), "named.pt", key_type="name", buffers="*rope")["optimizer"]
    names = [f"_orig_mod.{name}" for name in PARAMETERS]
    assert list(named["state"]) == [*names, "custom"] and named["param_groups"][0]["params"] == names
    assert fsdpckpt.diff("source.pt", "named.pt").same


def test_clean_names_is_an_option() -> None:
    compiled(words="_orig_mod.")
    report = fsdpckpt.convert("source.pt", "clean.pt", clean_names=True)
    clean = torch.load("clean.pt")
    Model(2).load_state_dict(clean["model"])
    assert clean["optimizer"]["param_groups"][0]["param_names"] == PARAMETERS
    assert "_orig_mod.rope -> rope" in notes(report, "normalised")[0].keys
    for number, glob in enumerate(("_orig_mod.body.*", "body.*")):
        options = {"include": glob, "only": "model", "strip_prefix": "_orig_mod."}
        assert list(converted("source.pt", f"{number}.pt", **options)) == ["body.weight", "body.bias"]
    once = converted("source.pt", "once.pt", add_prefix="_orig_mod.")
    torch.compile(Model(2)).load_state_dict(once["model"])


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("top", [True, False])
def test_from_dcp_to_dcp_keys_and_levels_stay(*, flat: bool, top: bool) -> None:
    """Muon and AdamW as PyTorch joins them; ``top``: the model's names at the top level."""

    def states_of(seed: int, epoch: int) -> dict[str, Any]:
        model = Model(seed)
        job = Job(model, [["body.bias"]], lr=0.01)
        matrices = [param for param in model.parameters() if param.ndim == 2]
        muon = torch.optim.Muon(matrices, lr=0.1)
        muon.step()
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        of_model, optim = get_state_dict(model, [muon, job.optimizer], options=options)
        sections = {**of_model, "optim": optim} if top else {"app": {"net": of_model, "optim": optim}}
        return {**sections, "epoch": epoch}

    saved, filled = states_of(1, 3), states_of(2, 0)
    dcp.save(saved, checkpoint_id="saved", no_dist=True)
    fsdpckpt.convert("saved", "for3", to="sharded", world_size=3)
    keys = [dcp.FileSystemReader(name).read_metadata().state_dict_metadata.keys() for name in ("saved", "for3")]
    assert keys[0] == keys[1]
    dcp.load(filled, checkpoint_id="for3", no_dist=True)
    require_identical(filled, saved)


@pytest.mark.parametrize("named", ["compiled", "clean"])
def test_dcp_load_fills_a_compiled_model_and_a_plain_one(named: str) -> None:
    model = Model(1)
    saved = torch.compile(model).state_dict() if named == "compiled" else model.state_dict()
    save({"model": saved})
    for target in (Model(2), torch.compile(Model(3))):
        state = target.state_dict()
        dcp.load({"model": state}, storage_reader=fsdpckpt.StorageReader("source.pt"), no_dist=True)
        target.load_state_dict(state)
        require_identical(list(target.state_dict().values()), list(saved.values()))
    with pytest.raises(dcp.api.CheckpointException, match=r"model\._orig_mod\.more"):
        state = {"_orig_mod.more": torch.zeros(2)}
        dcp.load({"model": state}, storage_reader=fsdpckpt.StorageReader("source.pt"), no_dist=True)


@pytest.mark.parametrize("target", ["copy.pt", "dcp"])
def test_ids_stay_ids_beside_an_entry_that_a_user_added_to_the_state(target: str) -> None:
    state = Job(Model()).ids
    state["state"]["custom"] = {"ema": torch.ones(2)}
    report = fsdpckpt.convert(
        save({"optimizer": state}), target, **({"world_size": 2, "to": "sharded"} if target == "dcp" else {})
    )
    assert not notes(report, "rekeyed")
    assert fsdpckpt.inspect("source.pt").key_type == "id"
    assert fsdpckpt.diff("source.pt", target).same


def test_a_renamed_optimizer_leaves_the_number_that_a_user_added_a_number() -> None:
    named = {"w": {"exp_avg": torch.ones(5)}, 7: {"ema": torch.ones(3)}}
    save({"model": {"w": torch.ones(5)}, "optimizer": {"state": named, "param_groups": [{"lr": 0.1, "params": ["w"]}]}})
    assert list(states(converted("source.pt", "out.pt", rename={"w": "v"}))) == ["v", 7]


def test_a_cast_of_states_in_a_list_leaves_their_copy_in_the_extras_as_it_is() -> None:
    """SOAP keeps lists of matrices; one dict under two keys is read as the same tensors."""
    held = {"GG": [torch.ones(5, 5)], "exp_avg": torch.ones(5)}
    optimizer = {"state": {0: held}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    save({"model": {"w": torch.ones(5)}, "optimizer": optimizer, "best": [held]})
    fsdpckpt.convert("source.pt", "safe", container="safetensors", optim_dtype="bfloat16")
    for source, options in (("source.pt", {"optim_dtype": "bfloat16"}), ("safe", {"to": "full"})):
        written = converted(source, f"{source}.out.pt", **options)
        assert states(written)[0]["GG"][0].dtype is torch.bfloat16
        require_identical(written["best"], [held])
