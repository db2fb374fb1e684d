"""A new name is in force wherever a name stands: in keys, groups, ``param_names`` and recorded facts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, UsageError
from tests.oracle.compare import identical


class Model(nn.Module):
    """The buffer comes first, and three parameters have one shape."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("rope", torch.ones(3, 3))
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 3, bias=False)
        self.last = nn.Linear(3, 3, bias=False)


def trained(model: nn.Module, groups: list[Any]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(groups, lr=0.1, foreach=False)
    for param in model.parameters():
        param.grad = torch.randn(param.shape)
    optimizer.step()
    return optimizer


RENAMES: dict[str, tuple[dict[str, Any], str, str]] = {
    "no rename": ({}, "rope", "*.weight"),
    "a prefix": ({"add_prefix": "net."}, "net.rope", "net.body"),
    "the buffer": ({"rename": {"rope": "freqs"}}, "freqs", "body"),
    "a prefix less": ({"strip_prefix": "ema.", "add_prefix": "x."}, "x.rope", "x.body"),
}


@pytest.mark.parametrize("how", RENAMES)
def test_a_buffer_that_nothing_tells_apart_is_still_a_question_after_a_rename(tmp_path: Path, how: str) -> None:
    options, buffer, unit = RENAMES[how]
    model = Model()
    optimizer = trained(model, [*model.parameters()])
    lead = options.get("strip_prefix", "")
    named = {f"{lead}{name}": leaf for name, leaf in model.state_dict().items()}
    torch.save({"model": named, "optimizer": optimizer.state_dict()}, tmp_path / "full.pt")
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "dcp", to="sharded", world_size=2, container="dcp", **options)
    written = json.loads((tmp_path / "dcp" / "fsdpckpt.json").read_text())
    assert written["undetermined"][0] == buffer
    assert any(note["kind"] == "undetermined" and buffer in note["message"] for note in written["notes"])
    targets: tuple[dict[str, Any], ...] = (
        {"to": "sharded", "container": "torch"},
        {"to": "flattened", "unit": unit, "use_orig_params": True},
    )
    for number, target in enumerate(targets):
        with pytest.raises(NeedsInformationError):
            fsdpckpt.convert(tmp_path / "dcp", tmp_path / f"again{number}", world_size=2, **target)


def test_a_placements_rule_cuts_what_is_undetermined_under_its_new_name(tmp_path: Path) -> None:
    model = Model()
    torch.save(model.state_dict(), tmp_path / "full.pt")
    (tmp_path / "rules.json").write_text(json.dumps({"net.*": {"tp": "Shard(0)"}}))
    cut = {"to": "sharded", "container": "dcp", "mesh": "tp=3", "placements": tmp_path / "rules.json"}
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "dcp", add_prefix="net.", **cut)  # type: ignore[arg-type]
    written = json.loads((tmp_path / "dcp" / "fsdpckpt.json").read_text())
    assert written["undetermined"] == [f"net.{name}" for name in model.state_dict()]


@pytest.mark.parametrize("lead", ["", "_orig_mod."])
def test_param_names_beside_ids_have_the_new_names_and_name_the_right_states(tmp_path: Path, lead: str) -> None:
    model = Model()
    named = [(f"{lead}{name}", param) for name, param in model.named_parameters()]
    groups = [{"params": named[2:][::-1]}, {"params": named[:2]}]  # last, head, then the body
    optimizer = trained(model, groups)
    prefixed = {f"{lead}{name}": leaf for name, leaf in model.state_dict().items()}
    torch.save({"model": prefixed, "optimizer": optimizer.state_dict()}, tmp_path / "ids.pt")
    fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "new.pt", rename={f"{lead}head": f"{lead}out"})
    listed = [group["param_names"] for group in torch.load(tmp_path / "new.pt")["optimizer"]["param_groups"]]
    assert listed[0] == [f"{lead}last.weight", f"{lead}out.weight"]
    fsdpckpt.convert(tmp_path / "new.pt", tmp_path / "names.pt", key_type="name")
    state = torch.load(tmp_path / "names.pt")["optimizer"]["state"]
    for name, param in model.named_parameters():
        new = f"{lead}{name}".replace("head", "out")
        assert identical(state[new]["exp_avg"], optimizer.state[param]["exp_avg"]), name


def test_an_optimizer_alone_is_renamed_by_its_param_names(tmp_path: Path) -> None:
    model = Model()
    optimizer = trained(model, [{"params": [*model.named_parameters()]}])
    torch.save(optimizer.state_dict(), tmp_path / "optim.pt")
    fsdpckpt.convert(tmp_path / "optim.pt", tmp_path / "new.pt", only="optim", add_prefix="net.")
    (group,) = torch.load(tmp_path / "new.pt")["param_groups"]
    assert group["param_names"] == [f"net.{name}" for name, _ in model.named_parameters()]


def test_clean_names_cleans_param_names(tmp_path: Path) -> None:
    model = Model()
    compiled = torch.compile(model)
    optimizer = trained(model, [{"params": [*compiled.named_parameters()]}])
    torch.save({"model": compiled.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "ids.pt")
    fsdpckpt.convert(tmp_path / "ids.pt", tmp_path / "clean.pt", clean_names=True)
    (group,) = torch.load(tmp_path / "clean.pt")["optimizer"]["param_groups"]
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
    model.load_state_dict(torch.load(tmp_path / "clean.pt")["model"])


SPELLINGS = {
    "a compiled model": ("_orig_mod.{}", "{}"),
    "a compiled model's optimizer": ("{}", "_orig_mod.{}"),
    "a model in DistributedDataParallel": ("module.{}", "{}"),
    "its optimizer": ("{}", "module.{}"),
    "both": ("module._orig_mod.{}", "_orig_mod.{}"),
    "another wrapper": ("{}", "_checkpoint_wrapped_module.{}"),
}


@pytest.mark.parametrize("how", SPELLINGS)
@pytest.mark.parametrize("spelled", ["the model's", "the optimizer's", "plain"])
def test_a_parameter_that_two_sections_spell_differently_is_renamed_in_both(
    tmp_path: Path, how: str, spelled: str
) -> None:
    """A rule may have any of the names that ``inspect`` shows, or that without wrappers."""
    in_model, in_optim = SPELLINGS[how]
    model = Model()
    model.body.register_buffer("scale", torch.ones(3))  # which the optimizer does not spell at all
    names = [name for name, _ in model.named_parameters()]
    saved = trained(model, [*model.parameters()]).state_dict()
    states = {name: saved["state"][number] for number, name in enumerate(names)}
    group = {**saved["param_groups"][0], "params": [in_optim.format(name) for name in names]}
    optim = {"state": {in_optim.format(name): entry for name, entry in states.items()}, "param_groups": [group]}
    weights = {in_model.format(name): leaf for name, leaf in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": optim}, tmp_path / "a.pt")
    form = {"the model's": in_model, "the optimizer's": in_optim, "plain": "{}"}[spelled]
    rename = {form.format("body"): form.format("trunk.body"), form.format("head.weight"): form.format("lm.weight")}
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", rename=rename)
    new = {name: name.replace("body.", "trunk.body.").replace("head.", "lm.") for name in model.state_dict()}
    written = torch.load(tmp_path / "b.pt")
    assert list(written["model"]) == [in_model.format(new[name]) for name in model.state_dict()]
    assert list(written["optimizer"]["state"]) == [in_optim.format(new[name]) for name in names]
    assert written["optimizer"]["param_groups"][0]["params"] == [in_optim.format(new[name]) for name in names]
    for name in names:
        entry = written["optimizer"]["state"][in_optim.format(new[name])]
        assert identical(entry["exp_avg"], states[name]["exp_avg"])


def test_each_of_two_compiled_models_is_renamed_with_its_optimizer(tmp_path: Path) -> None:
    saved: dict[str, Any] = {}
    for seed, name in enumerate(("actor", "critic")):
        model = Model(seed)
        saved[name] = {f"_orig_mod.{key}": leaf for key, leaf in model.state_dict().items()}
        state = trained(model, [*model.named_parameters()] if seed else [*model.parameters()]).state_dict()
        saved[f"{name}_optimizer"] = state
    torch.save(saved, tmp_path / "a.pt")
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", rename={"head": "lm"})
    written = torch.load(tmp_path / "b.pt")
    for name in ("actor", "critic"):
        expected = [key.replace("head", "lm") for key in saved[name]]
        assert list(written[name]) == expected
        assert all(
            identical(written[name][new], leaf) for new, leaf in zip(expected, saved[name].values(), strict=True)
        )
    words = saved["critic_optimizer"]["param_groups"][0]["param_names"]
    (group,) = written["critic_optimizer"]["param_groups"]
    assert group["param_names"] == [word.replace("head", "lm") for word in words]


def test_the_name_of_a_peft_adapter_stays_where_it_is(tmp_path: Path) -> None:
    """PEFT's model section has no ``default``, and the optimizer has the live model's names."""
    in_model = [f"layers.{n}.lora_{part}.weight" for n in range(2) for part in "AB"]
    in_optim = [name.replace(".weight", ".default.weight") for name in in_model]
    params = {name: torch.nn.Parameter(torch.randn(2, 3 + at)) for at, name in enumerate(in_optim)}
    saved = trained(
        torch.nn.ParameterDict({str(at): each for at, each in enumerate(params.values())}), [*params.values()]
    )
    state = saved.state_dict()
    named = {"state": dict(zip(in_optim, state["state"].values(), strict=True))}
    named["param_groups"] = [{**state["param_groups"][0], "params": in_optim}]
    weights = {name: param.detach() for name, param in zip(in_model, params.values(), strict=True)}
    torch.save({"model": weights, "optimizer": named}, tmp_path / "a.pt")
    rename = {"layers.0.lora_A.weight": "layers.0.lora_C.weight", "layers.1": "blocks.1"}
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", rename=rename)

    def new(names: list[str]) -> list[str]:
        return [name.replace("layers.0.lora_A", "layers.0.lora_C").replace("layers.1", "blocks.1") for name in names]

    written = torch.load(tmp_path / "b.pt")
    assert list(written["model"]) == new(in_model)
    assert list(written["optimizer"]["state"]) == new(in_optim) == written["optimizer"]["param_groups"][0]["params"]


@pytest.mark.parametrize("in_words", ["", "module."])
@pytest.mark.parametrize("in_model", ["", "module."])
@pytest.mark.parametrize("names", [("actor", "critic"), ("model",)])
def test_named_parameters_from_before_or_after_distributed_data_parallel(
    tmp_path: Path, in_model: str, in_words: str, names: tuple[str, ...]
) -> None:
    """The optimizer has the names of one of both, the model those of the other; globs and rules have either."""
    saved: dict[str, Any] = {}
    states: dict[str, dict[str, Any]] = {}
    for seed, name in enumerate(names):
        model = Model(seed)
        named = [(f"{in_words}{key}", param) for key, param in model.named_parameters()]
        optimizer = trained(model, [{"params": named[::-1]}])
        saved[name] = {f"{in_model}{key}": leaf for key, leaf in model.state_dict().items()}
        saved[f"{name}_optimizer"] = optimizer.state_dict()
        states[name] = {key: optimizer.state[param]["exp_avg"] for key, param in model.named_parameters()}
    torch.save(saved, tmp_path / "a.pt")
    options = {"rename": {"body": "trunk"}, "exclude": ["head.*"]}
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", key_type="name", **options)
    written = torch.load(tmp_path / "b.pt")
    for name in names:
        kept = [key for key in saved[name] if "head" not in key]
        assert list(written[name]) == [key.replace("body", "trunk") for key in kept]
        state = written["optimizer" if name == "model" else f"{name}_optimizer"]["state"]
        expected = {key: leaf for key, leaf in states[name].items() if key != "head.weight"}
        assert sorted(state) == sorted(f"{in_model}{key}".replace("body", "trunk") for key in expected)
        for key, leaf in expected.items():
            assert identical(state[f"{in_model}{key}".replace("body", "trunk")]["exp_avg"], leaf)


SPELLED: dict[str, tuple[dict[str, Any], dict[str, str | None]]] = {
    "a rule with module.": ({"rename": {"module.body": "module.trunk"}}, {"body": "trunk"}),
    "a rule without": ({"rename": {"body": "trunk"}}, {"body": "trunk"}),
    "one parameter": ({"rename": {"module.last.weight": "module.tail"}}, {"last.weight": "tail"}),
    "a prefix": ({"add_prefix": "net."}, {"": "net."}),
    "include with module.": ({"include": ["module.body.*"]}, {"head": None, "last": None, "rope": None}),
    "exclude with module.": ({"exclude": ["module.body.*"]}, {"body": None}),
}


@pytest.mark.parametrize("how", SPELLED)
@pytest.mark.parametrize("kept_in", ["two optimizers", "two numbered optimizers", "one model"])
def test_a_rule_as_one_section_spells_names_is_in_force_in_all(tmp_path: Path, kept_in: str, how: str) -> None:
    """The models have plain names, and the optimizers those of DistributedDataParallel."""
    options, wanted = SPELLED[how]
    names = ("model",) if kept_in == "one model" else ("actor", "critic")
    saved: dict[str, Any] = {}
    for seed, name in enumerate(names):
        model = Model(seed)
        named = [(f"module.{key}", param) for key, param in model.named_parameters()]
        optimizer = trained(model, [param for _, param in named])
        saved[name] = model.state_dict()
        key = f"optim{seed}" if "numbered" in kept_in else f"{name}_optimizer"
        saved["optimizer" if len(names) == 1 else key] = by_name(optimizer, named)
    torch.save(saved, tmp_path / "a.pt")
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", **options)
    written = torch.load(tmp_path / "b.pt")
    assert written.keys() == saved.keys()
    for section, content in saved.items():
        before, now = content.get("state", content), written[section].get("state", written[section])
        lead = "module." if "state" in content else ""
        expected = {}
        for name in before:
            new = renamed(name.removeprefix(lead), wanted)
            if new is not None:
                expected[lead + new] = before[name]
        assert sorted(now) == sorted(expected)
        for name, value in expected.items():
            leaf, found = (value["exp_avg"], now[name]["exp_avg"]) if lead else (value, now[name])
            assert identical(leaf, found)


def by_name(optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]]) -> dict[str, Any]:
    """The state dict of ``optimizer``, keyed by name."""
    held = optimizer.state_dict()
    names = [name for name, _ in named]
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in held["param_groups"]]
    return {"state": {names[number]: states for number, states in held["state"].items()}, "param_groups": groups}


def renamed(name: str, changes: dict[str, str | None]) -> str | None:
    for old, new in changes.items():
        if name.startswith(old):
            return None if new is None else new + name.removeprefix(old)
    return name


def test_the_module_that_only_the_optimizer_names_can_be_stripped(tmp_path: Path) -> None:
    model = Model()
    named = [(f"module.{key}", param) for key, param in model.named_parameters()]
    saved = {"model": model.state_dict(), "optimizer": by_name(trained(model, [param for _, param in named]), named)}
    torch.save(saved, tmp_path / "a.pt")
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", strip_prefix="module.")
    written = torch.load(tmp_path / "b.pt")
    assert list(written["model"]) == list(saved["model"])
    assert list(written["optimizer"]["state"]) == [name for name, _ in model.named_parameters()]
    with pytest.raises(UsageError, match="would both be named"):
        fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "c.pt", rename={"module.last": "head"})


def test_a_module_called_module_is_not_the_wrapper(tmp_path: Path) -> None:
    model = nn.ModuleDict({"module": nn.Linear(3, 3), "weight": nn.Linear(3, 2)})
    torch.save({"actor": model.state_dict(), "critic": model.state_dict()}, tmp_path / "a.pt")
    fsdpckpt.convert(tmp_path / "a.pt", tmp_path / "b.pt", rename={"module": "body"})
    assert list(torch.load(tmp_path / "b.pt")["actor"]) == ["body.weight", "body.bias", "weight.weight", "weight.bias"]
