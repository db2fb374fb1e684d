"""Several models, and several optimizers, in flattened targets: real FSDP1 loads each of them, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceUnsupportedError, UsageError
from fsdpckpt.options.commands import UnitsOptions
from fsdpckpt.queries.units import find_units
from tests.flat.jobs import (
    ODD,
    RANKS,
    Job,
    Keys,
    Named,
    Net,
    Values,
    by_module,
    matrices_and_rest,
    put,
    train,
    under,
    written,
)
from tests.oracle.compare import identical, require_identical
from tests.oracle.fake_group import as_rank

pytestmark = pytest.mark.filterwarnings("ignore")


def one_of(key: str) -> Callable[[Named], dict[Keys, torch.optim.Optimizer]]:
    return lambda named: {(key,): torch.optim.AdamW(named.values(), lr=0.01)}


def several_optimizers(*, use_orig_params: bool) -> Job:
    optimizers = matrices_and_rest if use_orig_params else by_module
    return Job({("model",): ODD}, {("model",): under("optimizers")(optimizers)}, use_orig_params)


def several_models(*, use_orig_params: bool) -> Job:
    models = {("generator",): ODD, ("critic",): [(4, 3)]}
    optimizers = {("generator",): one_of("generator_optimizer"), ("critic",): one_of("critic_optimizer")}
    return Job(models, optimizers, use_orig_params)


def both(*, use_orig_params: bool) -> Job:
    """A main model with two optimizers, beside another model with one."""
    first = several_optimizers(use_orig_params=use_orig_params)
    optimizers = {**first.optimizers, ("critic",): one_of("critic_optimizer")}
    return Job({**first.models, ("critic",): [(4, 3)]}, optimizers, use_orig_params)


def full_models(job: Job, path: Path) -> str:
    """A reference: the names and shapes of each model."""
    models: dict[str, Any] = {}
    for keys, layers in job.models.items():
        put(models, keys, Net(layers).state_dict())
    torch.save(models, path)
    return str(path)


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("job_of", [several_models, both])
def test_fsdp1_loads_every_section_on_other_ranks(
    job_of: Callable[..., Job], use_orig_params: bool, tmp_path: Path
) -> None:
    job = job_of(use_orig_params=use_orig_params)
    source = tmp_path / "source"
    source.mkdir()
    trained = job.run(RANKS, save=source)
    reference = full_models(job, tmp_path / "names.pt")
    fsdpckpt.convert(source, tmp_path / "flat", world_size=2, reference=reference, to="flattened", verify="full")
    require_identical(job.run(2, load=tmp_path / "flat"), trained)
    assert fsdpckpt.verify(tmp_path / "flat").whole
    # What is written says itself what its flat parameters hold, also on the way over whole tensors.
    fsdpckpt.convert(tmp_path / "flat", tmp_path / "full.pt", key_type="name")
    assert fsdpckpt.diff(tmp_path / "flat", tmp_path / "full.pt").same
    # Without original parameters, only what was recorded says that an optimizer lists the root's last.
    options: dict[str, Any] = {"unit": ["blocks.*"], "use_orig_params": True}
    if not use_orig_params:
        options = {"units": str(tmp_path / "flat" / "fsdpckpt.json")}
    options |= {"to": "flattened", "world_size": RANKS, "key_type": "id"}
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "again", **options)
    require_identical(job.run(RANKS, load=tmp_path / "again"), trained)


@pytest.mark.parametrize("key_type", ["name", "id"])
@pytest.mark.parametrize("models", [("model",), ("generator", "critic")])
def test_flat_parameters_are_counted_as_fsdp1_lists_them_where_the_source_lists_like_a_plain_model(
    models: tuple[str, ...], key_type: str, tmp_path: Path
) -> None:
    """The head, last in the model, is in the root's flat parameter, which FSDP1 lists first."""
    content: dict[str, Any] = {}
    expected: Values = {}
    for model in models:
        optimizer_key = "optimizer" if model == "model" else f"{model}_optimizer"
        net = Net(ODD)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        train(optimizer, 0, padded=False)
        names = [name for name, _ in net.named_parameters()]
        content |= {model: net.state_dict(), optimizer_key: optimizer.state_dict()}
        if key_type == "name":
            state = dict(zip(names, content[optimizer_key]["state"].values(), strict=True))
            groups = [{**content[optimizer_key]["param_groups"][0], "params": names}]
            content[optimizer_key] = {"state": state, "param_groups": groups}
        for name, param in net.named_parameters():
            expected[(model,), name, ""] = param.detach().reshape(-1)
            for each, value in optimizer.state[param].items():
                expected[(optimizer_key,), name, each] = value.reshape(-1)
    torch.save(content, tmp_path / "plain.pt")
    options: dict[str, Any] = {**FLAT, "use_orig_params": False, "key_type": "id", "buffers": ["none"]}
    report = fsdpckpt.convert(tmp_path / "plain.pt", tmp_path / "flat", unit=["blocks.*"], **options)
    assert sum("an outer module's flat parameter first" in note.message for note in report.notes) == len(models)
    keys = {(model,): one_of("optimizer" if model == "model" else f"{model}_optimizer") for model in models}
    job = Job({(model,): ODD for model in models}, keys, use_orig_params=False)
    require_identical(job.run(2, load=tmp_path / "flat"), expected)


@pytest.mark.parametrize("to", ["flattened", "sharded"])
def test_a_glob_for_buffers_is_for_the_models_that_have_them(to: Any, tmp_path: Path) -> None:
    content: dict[str, Any] = {}
    for model in ("generator", "critic"):
        net = Net(ODD)
        if model == "critic":
            net.register_buffer("table", torch.randn(4, 3))
        optimizer = torch.optim.AdamW(net.parameters())
        train(optimizer, 0, padded=False)
        content |= {model: net.state_dict(), f"{model}_optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "plain.pt")
    options: dict[str, Any] = {"unit": ["blocks.*"], "use_orig_params": True} if to == "flattened" else {}
    options |= {"to": to, "world_size": 2, "container": "torch"}
    fsdpckpt.convert(tmp_path / "plain.pt", tmp_path / "out", buffers=["table"], **options)
    assert fsdpckpt.diff(tmp_path / "plain.pt", tmp_path / "out").same
    held = written(tmp_path / "out", 1, 2, ("critic",))["table"]
    assert type(held) is torch.Tensor
    assert identical(held, content["critic"]["table"])
    with pytest.raises(UsageError, match="matches no"):
        fsdpckpt.convert(tmp_path / "plain.pt", tmp_path / "no", buffers=["table", "tabel"], **options)


Full = Callable[[Callable[..., Job]], Path]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Full:
    """Full checkpoints of trained jobs, their optimizers keyed by name; each is made once."""
    return cache(lambda job_of: make_full(job_of(use_orig_params=True), tmp_path_factory.mktemp("job")))


def make_full(job: Job, folder: Path) -> Path:
    source = folder / "source"
    source.mkdir()
    job.run(RANKS, save=source)
    reference = full_models(job, folder / "names.pt")
    fsdpckpt.convert(source, folder / "full.pt", key_type="name", reference=reference)
    return folder / "full.pt"


FLAT: dict[str, Any] = {"to": "flattened", "world_size": 2, "use_orig_params": True}


def test_one_section_of_a_flattened_checkpoint_is_taken_alone(full: Full, tmp_path: Path) -> None:
    source = full(both)
    fsdpckpt.convert(source, tmp_path / "flat", unit=["blocks.*"], **FLAT)
    whole = torch.load(source)
    for label, expected in (
        ("optim:muon", whole["optimizers"]["muon"]["state"]),
        ("optim:critic_optimizer", whole["critic_optimizer"]["state"]),
        ("model:critic", whole["critic"]),
    ):
        fsdpckpt.convert(tmp_path / "flat", tmp_path / f"{label}.pt", only=label, key_type=key_type_of(label))
        found = torch.load(tmp_path / f"{label}.pt")
        found = found["state"] if "optim" in label else found
        assert identical(found, expected)
        # It is flattened alone, too, and its file has the section itself.
        fsdpckpt.convert(tmp_path / "flat", tmp_path / label, only=label, to="flattened", world_size=3)
        assert fsdpckpt.diff(tmp_path / f"{label}.pt", tmp_path / label).same


def key_type_of(label: str) -> Any:
    return "name" if "optim" in label else None


def test_an_average_of_weights_stays_whole(full: Full, tmp_path: Path) -> None:
    """No optimizer trains it, so nothing says that FSDP1 wraps it. A round trip does not flatten it either."""
    source = tmp_path / "full.pt"
    content = torch.load(full(several_optimizers))
    content["ema"] = {name: value * 2 for name, value in content["model"].items()}
    torch.save(content, source)
    report = fsdpckpt.convert(source, tmp_path / "flat", unit=["blocks.*"], **FLAT)
    assert any("model:ema stays whole" in note.message for note in report.notes)
    for step in ("flat", "on-3"):
        if step == "on-3":
            fsdpckpt.convert(tmp_path / "flat", tmp_path / step, world_size=3)
        ranks = 2 if step == "flat" else 3
        assert identical(dict(written(tmp_path / step, 1, ranks, ("ema",))), content["ema"])
        assert fsdpckpt.diff(source, tmp_path / step).same
    fsdpckpt.convert(source, tmp_path / "ema", unit=["blocks.*"], only="model:ema", buffers=["none"], **FLAT)
    assert "_flat_param" in written(tmp_path / "ema", 0, 2, ("model",))


def test_on_one_rank_the_recorded_units_say_that_sections_are_flattened(full: Full, tmp_path: Path) -> None:
    """Nothing else does: each slice is all of its flat parameter."""
    options: dict[str, Any] = {**FLAT, "world_size": 1, "use_orig_params": False, "key_type": "id"}
    fsdpckpt.convert(full(several_models), tmp_path / "flat", unit=["blocks.*"], **options)
    assert fsdpckpt.diff(full(several_models), tmp_path / "flat").same
    assert fsdpckpt.verify(tmp_path / "flat").whole
    assert "critic_optimizer.head.weight.exp_avg" in set(fsdpckpt.open(tmp_path / "flat"))


def test_units_are_given_for_each_model(full: Full, tmp_path: Path) -> None:
    source = full(several_models)
    fsdpckpt.convert(source, tmp_path / "flat", unit=["generator.blocks.1", "critic.none"], **FLAT)
    keys = {
        name: [key for key in written(tmp_path / "flat", 0, 2, (name,)) if key.endswith("_flat_param")]
        for name in ("generator", "critic")
    }
    assert keys == {"generator": ["blocks.1._flat_param", "_flat_param"], "critic": ["_flat_param"]}
    assert fsdpckpt.diff(source, tmp_path / "flat").same
    with pytest.raises(UsageError, match="matches no module"):  # neither model has it
        fsdpckpt.convert(source, tmp_path / "no", unit=["blocks.*", "layers.*"], **FLAT)
    with pytest.raises(NeedsInformationError, match=r"optim:critic_optimizer: cannot tell which modules"):
        fsdpckpt.convert(source, tmp_path / "no", unit=["generator.blocks.*"], **FLAT)


def test_the_units_of_every_section_are_taken_from_what_was_written(full: Full, tmp_path: Path) -> None:
    source = full(both)
    fsdpckpt.convert(source, tmp_path / "flat", unit=["blocks.1", "critic.none"], **FLAT)
    units = str(tmp_path / "flat" / "fsdpckpt.json")
    options: dict[str, Any] = {"units": units, "to": "flattened", "world_size": 3}
    fsdpckpt.convert(source, tmp_path / "again", **options)
    assert fsdpckpt.diff(tmp_path / "flat", tmp_path / "again").same
    for label in ("optim:muon", "model:critic", "optim:critic_optimizer"):
        fsdpckpt.convert(source, tmp_path / label, only=label, **options)
        name = f"{label[:5]}_world_size_3_rank_1.pt"
        keys = ("optimizers", "muon") if "muon" in label else (label.partition(":")[2],)
        with as_rank(1, 3):
            alone = torch.load(tmp_path / label / name, weights_only=False)
        of_all = written(tmp_path / "again", 1, 3, keys)
        if "model" in label:
            alone, of_all = (each["_flat_param"].local_shards()[0].tensor for each in (alone, of_all))
        assert identical(alone, of_all)


def test_optimizers_without_their_model_need_its_names(full: Full, tmp_path: Path) -> None:
    """The names of one are not all that a flat parameter has."""
    torch.save({"optimizers": torch.load(full(several_optimizers))["optimizers"]}, tmp_path / "optimizers.pt")
    with pytest.raises(NeedsInformationError, match=r"optim:muon: .* has no names and shapes"):
        fsdpckpt.convert(tmp_path / "optimizers.pt", tmp_path / "flat", unit=["blocks.*"], **FLAT)
    reference = {"reference": str(full(several_optimizers)), "buffers": ["none"]}
    fsdpckpt.convert(tmp_path / "optimizers.pt", tmp_path / "flat", unit=["blocks.*"], **reference, **FLAT)
    fsdpckpt.convert(full(several_optimizers), tmp_path / "whole", unit=["blocks.*"], **FLAT)
    for key in ("muon", "adam"):
        places = (tmp_path / name for name in ("flat", "whole"))
        assert identical(*(written(place, 0, 2, ("optimizers", key)) for place in places))


def test_states_are_made_in_every_section(full: Full, tmp_path: Path) -> None:
    """The zeros of each are a file of their own to the copies."""
    content = torch.load(full(both))
    del content["critic_optimizer"]["state"]["head.weight"], content["optimizers"]["adam"]["state"]["head.weight"]
    torch.save(content, tmp_path / "holes.pt")
    options: dict[str, Any] = {"missing_state": "zeros", "verify": "full"}
    fsdpckpt.convert(tmp_path / "holes.pt", tmp_path / "filled.pt", to="full", **options)
    filled = torch.load(tmp_path / "filled.pt")
    for optimizer in (filled["critic_optimizer"], filled["optimizers"]["adam"]):
        assert identical(optimizer["state"]["head.weight"]["exp_avg"], torch.zeros(2, 3))
    fsdpckpt.convert(tmp_path / "holes.pt", tmp_path / "flat", unit=["blocks.*"], **options, **FLAT)
    assert fsdpckpt.diff(tmp_path / "filled.pt", tmp_path / "flat").same


def test_what_optimizers_would_share_and_what_keeps_one_is_refused_with_what_does_not(
    full: Full, tmp_path: Path
) -> None:
    source = full(several_optimizers)
    for change, error, words, advice in (
        ({"use_orig_params": False}, SourceUnsupportedError, r"optim:muon: a flat parameter has to be in one",
         "add --use-orig-params"),
        ({"flavor": "verl"}, NeedsInformationError, "verl saves one optimizer", "which keeps all"),
    ):  # fmt: skip
        with pytest.raises(error, match=words) as refused:
            fsdpckpt.convert(source, tmp_path / "flat", unit=["blocks.*"], **{**FLAT, **change})
        assert advice in str(refused.value.next_step)


def test_all_optimizers_of_a_model_decide_what_is_trained(full: Full, tmp_path: Path) -> None:
    """One of them lists only some parameters: the others are not frozen for that. What none lists is."""
    source = tmp_path / "full.pt"
    content = torch.load(full(several_optimizers))
    for group in content["optimizers"]["adam"]["param_groups"]:
        group["params"].remove("head.bias")
    del content["optimizers"]["adam"]["state"]["head.bias"]
    torch.save(content, source)
    with pytest.raises(NeedsInformationError, match=r"head.bias may be a parameter or a buffer"):
        fsdpckpt.convert(source, tmp_path / "flat", unit=["blocks.*"], **FLAT)
    fsdpckpt.convert(source, tmp_path / "flat", unit=["blocks.*"], buffers=["none"], **FLAT)
    document = json.loads((tmp_path / "flat" / "fsdpckpt.json").read_text())
    every = [document["units"], *(entry["units"] for entry in document["section_units"])]
    assert [len(units.pop("groups") or ()) for units in every] == [0, 1, 1]
    assert every[0] == every[1] == every[2]
    frozen = [param["name"] for unit in every[0]["units"] for param in unit["params"] if "requires_grad" in param]
    assert frozen == ["head.bias"]


def test_units_are_those_of_the_main_model_or_a_message_says_where_others_are(full: Full, tmp_path: Path) -> None:
    found = find_units(str(full(both)), UnitsOptions(unit=("blocks.*",), use_orig_params=True)).units
    assert sorted(found.parameters) == sorted(torch.load(full(both))["model"])
    assert all(param.requires_grad for param in found.params().values())
    fsdpckpt.convert(full(several_models), tmp_path / "flat", unit=["blocks.*"], **FLAT)
    for path, advice in (
        (full(several_models), "--only optim:generator_optimizer"),
        (tmp_path / "flat", "fsdpckpt.json"),
    ):
        with pytest.raises(NeedsInformationError, match="several models or optimizers") as error:
            find_units(str(path), UnitsOptions())
        assert advice in str(error.value.next_step)
