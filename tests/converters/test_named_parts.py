"""Several models and optimizers, each in a file or directory of its own, are one checkpoint with named sections."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceIncompleteError
from tests.oracle.compare import identical, require_parts

State = dict[str, Any]


def trained(seed: int, prefix: str = "") -> tuple[State, State]:
    """A model, and its AdamW by name."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.randn(4, 5)).square().sum().backward()
    optimizer.step()
    names = [prefix + name for name, _ in model.named_parameters()]
    saved = optimizer.state_dict()
    states = {names[number]: state for number, state in saved["state"].items()}
    groups = [{**group, "params": names} for group in saved["param_groups"]]
    weights = {prefix + name: leaf for name, leaf in model.state_dict().items()}
    return weights, {"state": states, "param_groups": groups}


def save(content: State, path: Path) -> None:
    if path.suffix:
        torch.save(content, path)
    else:
        dcp.save(content, checkpoint_id=path, no_dist=True)


def saved_by_accelerate(path: Path, *, full: bool) -> list[tuple[State, State]]:
    """The files of ``save_state`` for two models and two optimizers (``utils/fsdp_utils.py``)."""
    path.mkdir()
    pairs = [trained(seed) for seed in range(2)]
    for number, (weights, states) in enumerate(pairs):
        suffix = f"_{number}" if number or not full else ""
        save(weights if full else {"model": weights}, path / f"pytorch_model_fsdp{suffix}{'.bin' if full else ''}")
        save(states if full else {"optimizer": states}, path / f"optimizer{suffix}{'.bin' if full else ''}")
        torch.save({"last_epoch": number}, path / f"scheduler{f'_{number}' if number else ''}.bin")
    for rank in range(2):
        torch.save({"step": 1, "rank": rank}, path / f"random_states_{rank}.pkl")
    return pairs


def loaded_by_accelerate(path: Path, number: int, like: tuple[State, State]) -> tuple[State, State]:
    """As ``load_fsdp_model`` and ``load_fsdp_optimizer`` do it."""
    weights, states = ({"model": like[0]}, {"optimizer": like[1]})
    dcp.load(weights, checkpoint_id=path / f"pytorch_model_fsdp_{number}", no_dist=True)
    dcp.load(states, checkpoint_id=path / f"optimizer_{number}", no_dist=True)
    return weights["model"], states["optimizer"]


@pytest.mark.parametrize("full", [False, True])
def test_models_that_accelerate_numbers_are_listed_selected_compared_and_converted(full: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    pairs = saved_by_accelerate(source, full=full)
    checkpoint = fsdpckpt.inspect(source).checkpoint
    labels = [named.label for named in checkpoint.named]
    assert sorted(labels) == [
        "model:pytorch_model_fsdp_0", "model:pytorch_model_fsdp_1", "optim:optimizer_0", "optim:optimizer_1"
    ]  # fmt: skip
    assert checkpoint.flavor == "accelerate" and fsdpckpt.verify(source).whole
    for number in range(2):
        fsdpckpt.convert(source, tmp_path / f"{number}.pt", only=f"model:pytorch_model_fsdp_{number}")
        assert identical(torch.load(tmp_path / f"{number}.pt"), pairs[number][0])
    fsdpckpt.convert(source, tmp_path / "all.pt", flavor="plain")
    found = torch.load(tmp_path / "all.pt")
    assert all(identical(found[f"pytorch_model_fsdp_{number}"], pairs[number][0]) for number in range(2))
    assert all(identical(found[f"optimizer_{number}"], pairs[number][1]) for number in range(2))
    assert fsdpckpt.diff(source, tmp_path / "all.pt").same
    other = tmp_path / "other"
    saved_by_accelerate(other, full=not full)
    assert fsdpckpt.diff(source, other).same
    content = torch.load(tmp_path / "all.pt")
    content["optimizer_1"]["state"]["0.bias"]["exp_avg"] += 1
    torch.save(content, tmp_path / "changed.pt")
    changed = [entry.key for entry in fsdpckpt.diff(source, tmp_path / "changed.pt").entries if entry.sigil == "*"]
    assert changed == ["optimizer_1.0.bias.exp_avg"] or changed == ["optimizer_1.state.0.bias.exp_avg"]


@pytest.mark.parametrize("full", [False, True])
def test_accelerate_resumes_from_what_they_become(full: bool, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    pairs = saved_by_accelerate(source, full=full)
    resumption = fsdpckpt.verify(source, flavor="accelerate").resumption
    assert resumption is not None and resumption.resumes
    report = fsdpckpt.convert(source, target, to="sharded", world_size=3, flavor="accelerate")
    assert report.flavor == "accelerate" and not any(note.kind == "not-carried" for note in report.notes)
    for number in range(2):
        found = loaded_by_accelerate(target, number, trained(9))
        assert identical(found[0], pairs[number][0]) and identical(found[1], pairs[number][1])
    assert (target / "scheduler_1.bin").read_bytes() == (source / "scheduler_1.bin").read_bytes()
    assert fsdpckpt.diff(source, target).same and fsdpckpt.verify(target, flavor="accelerate", world_size=3).whole
    again = tmp_path / "again"
    fsdpckpt.convert(target, again, to="full", flavor="accelerate")
    assert identical(torch.load(again / "pytorch_model_fsdp_1.bin"), pairs[1][0])
    assert identical(torch.load(again / "optimizer.bin"), pairs[0][1])


def test_ids_are_named_by_the_model_that_each_optimizer_has(tmp_path: Path) -> None:
    """Before the sections get numbers, which do not say what belongs together."""
    content: State = {}
    pairs = {name: trained(seed, f"{name}.") for seed, name in enumerate(("generator", "critic"))}
    for name, (weights, _) in pairs.items():
        content[name] = weights
    for name in ("critic", "generator"):  # in another order than the models
        states = pairs[name][1]
        by_id = {number: states["state"][key] for number, key in enumerate(states["state"])}
        content[f"{name}_optimizer"] = {
            "state": by_id,
            "param_groups": [{**states["param_groups"][0], "params": [*by_id]}],
        }
    torch.save(content, tmp_path / "source.pt")
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "out", flavor="accelerate", world_size=2, buffers="none")
    for number, (name, pair) in enumerate(pairs.items()):
        found = loaded_by_accelerate(tmp_path / "out", number, trained(9, f"{name}."))
        assert identical(found[0], pair[0]) and identical(found[1], pair[1])


def test_models_that_a_user_named_get_accelerates_numbers(tmp_path: Path) -> None:
    actor, critic = trained(1), trained(2)
    content = {"actor": actor[0], "critic": critic[0], "actor_opt": actor[1], "critic_opt": critic[1]}
    torch.save(content, tmp_path / "source.pt")
    report = fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "out", flavor="accelerate", world_size=2)
    assert any("critic becomes pytorch_model_fsdp_1" in note.message for note in report.notes)
    found = loaded_by_accelerate(tmp_path / "out", 1, trained(9))
    assert identical(found[0], critic[0]) and identical(found[1], critic[1])
    torch.save({"model": actor[0], "optimizer": actor[1], "ema_model": critic[0]}, tmp_path / "ema.pt")
    fsdpckpt.convert(tmp_path / "ema.pt", tmp_path / "two", flavor="accelerate", world_size=2)
    weights = {"model": trained(9)[0]}
    dcp.load(weights, checkpoint_id=tmp_path / "two" / "pytorch_model_fsdp_1", no_dist=True)
    assert identical(weights["model"], critic[0])


def two_modules(path: Path) -> dict[str, tuple[State, State]]:
    pairs = {name: trained(seed, f"{name}.") for seed, name in enumerate(("vit", "llm"))}
    for name, (weights, states) in pairs.items():
        save(weights, path / "model" / name)
        save(states, path / "optim" / name)
    return pairs


def test_modules_in_directories_are_named_models(tmp_path: Path) -> None:
    source = tmp_path / "source"
    pairs = two_modules(source)
    fsdpckpt.convert(source, tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt")
    assert found.keys() == {"vit", "llm", "vit_optim", "llm_optim"}
    for name, (weights, states) in pairs.items():
        assert identical(found[name], weights) and identical(found[f"{name}_optim"], states)
    assert fsdpckpt.diff(source, tmp_path / "all.pt").same and fsdpckpt.verify(source).whole
    fsdpckpt.convert(source, tmp_path / "dcp", to="sharded", world_size=2)
    assert fsdpckpt.diff(source, tmp_path / "dcp").same
    fsdpckpt.convert(source, tmp_path / "llm.pt", only="optim:llm_optim", key_type="id")
    assert torch.load(tmp_path / "llm.pt")["state"].keys() == {0, 1, 2, 3}


def test_directories_with_the_same_names_are_still_candidates(tmp_path: Path) -> None:
    """One model in two forms, or two steps of it: nothing says that they belong together."""
    for name in ("first", "second"):
        save(trained(1)[0], tmp_path / "model" / name)
    with pytest.raises(NeedsInformationError, match="2 candidates for the model"):
        fsdpckpt.inspect(tmp_path)


def test_modules_with_a_directory_for_each_section_may_be_of_one_class(tmp_path: Path) -> None:
    """``model/vit/ckpt`` and ``model/vit/optimizer``: the names of both modules are those of a Linear."""
    source = tmp_path / "run" / "global_step_3"
    pairs = {name: trained(seed) for seed, name in enumerate(("vit", "llm"))}
    for name, (weights, states) in pairs.items():
        save({"model": weights}, source / "model" / name / "ckpt")
        save({"optimizer": states}, source / "model" / name / "optimizer")
    (source / "extra_state").mkdir()
    for rank in range(2):
        torch.save({"global_step": 3, "rank": rank}, source / "extra_state" / f"rank_{rank}.pt")
    fsdpckpt.convert(tmp_path / "run", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt")
    for name, (weights, states) in pairs.items():
        assert identical(found[name], weights) and identical(found[f"{name}_optim"], states)
    assert fsdpckpt.verify(source).whole
    fsdpckpt.convert(source, tmp_path / "vit.pt", only="model:vit")
    assert identical(torch.load(tmp_path / "vit.pt"), pairs["vit"][0])


def saved_without_fsdp(path: Path, *, safe: bool, one_layer: bool) -> dict[str, State]:
    """The files of ``save_state`` for two models, of DistributedDataParallel or one process (``checkpointing.py``)."""
    path.mkdir()
    saved: dict[str, State] = {}
    torch.manual_seed(0)
    layer = torch.nn.Linear(5, 7)
    models = [torch.nn.Sequential(layer, torch.nn.Linear(7, 3)), layer if one_layer else torch.nn.Sequential(layer)]
    for number, model in enumerate(models):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for param in model.parameters():
            param.grad = torch.randn(param.shape)
        optimizer.step()
        name, suffix = ("model" if safe else "pytorch_model"), f"_{number}" if number else ""
        weights = {key: leaf.clone() for key, leaf in model.state_dict().items()}
        if safe:
            save_file(weights, path / f"{name}{suffix}.safetensors")
        else:
            torch.save(weights, path / f"{name}{suffix}.bin")
        torch.save(optimizer.state_dict(), path / f"optimizer{suffix}.bin")
        torch.save({"last_epoch": number}, path / f"scheduler{suffix}.bin")
        saved[f"{name}_{number}"] = weights
        saved[f"optimizer_{number}"] = torch.load(path / f"optimizer{suffix}.bin")
    torch.save({"step": 1, "torch_manual_seed": torch.get_rng_state()}, path / "random_states_0.pkl")
    return saved


@pytest.mark.parametrize("one_layer", [True, False])
@pytest.mark.parametrize("safe", [True, False])
def test_models_that_accelerate_saves_without_fsdp_are_sections_too(
    tmp_path: Path, safe: bool, one_layer: bool
) -> None:
    source = tmp_path / "source"
    saved = saved_without_fsdp(source, safe=safe, one_layer=one_layer)
    labels = {named.label.partition(":")[2] for named in fsdpckpt.inspect(source).checkpoint.named}
    assert labels == saved.keys() and fsdpckpt.verify(source).whole
    fsdpckpt.convert(source, tmp_path / "all.pt", flavor="plain")
    found = torch.load(tmp_path / "all.pt")
    require_parts(found, saved)
    assert fsdpckpt.diff(source, tmp_path / "all.pt").same
    if safe:  # safetensors has no order, and ids need one
        return
    fsdpckpt.convert(source, tmp_path / "out", to="sharded", world_size=2, flavor="accelerate")
    for number in range(2):
        weights = saved[f"pytorch_model_{number}"]
        states = saved[f"optimizer_{number}"]["state"]
        by_name = {name: states[place] for place, name in enumerate(weights)}
        like = {"state": by_name, "param_groups": [{"params": list(weights)}]}
        loaded = loaded_by_accelerate(tmp_path / "out", number, (zeros(weights), zeros(like)))
        assert identical(loaded[0], weights) and identical(loaded[1]["state"], by_name)


def zeros(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: zeros(entry) for key, entry in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("fsdp", [True, False])
@pytest.mark.parametrize("lost", ["model", "optimizer"])
def test_a_number_says_which_of_several_are_missing(tmp_path: Path, lost: str, fsdp: bool) -> None:
    source = tmp_path / "source"
    if fsdp:
        saved_by_accelerate(source, full=True)
    else:
        saved_without_fsdp(source, safe=False, one_layer=False)
    first = "optimizer.bin" if lost == "optimizer" else "pytorch_model_fsdp.bin" if fsdp else "pytorch_model.bin"
    (source / first).unlink()
    with pytest.raises(SourceIncompleteError, match=f"has {lost} number 1, but not the ones before it") as caught:
        fsdpckpt.inspect(source)
    assert caught.value.details == (f"{first} is missing",)
    assert fsdpckpt.verify(source / first.replace(".", "_1.")).whole  # given by its path it is all that is wanted


def test_one_numbered_optimizer_is_perhaps_one_of_several(tmp_path: Path) -> None:
    """Named by the user: a step, a rank or one of several. Beside a model of the same number it is a step."""
    weights, states = trained(0)
    torch.save(weights, tmp_path / "model.pt")
    torch.save(states, tmp_path / "optim_1.pt")
    (note,) = fsdpckpt.verify(tmp_path).notes
    assert "if it is one of several, the others are missing" in note
    (tmp_path / "model.pt").rename(tmp_path / "model_1.pt")
    assert fsdpckpt.verify(tmp_path).notes == ()


def test_a_number_may_be_a_date_and_a_time(tmp_path: Path) -> None:
    """The numbers before it are not counted one by one."""
    weights, states = trained(0)
    torch.save(weights, tmp_path / "model_20240101120000.pt")
    (note,) = [each for each in fsdpckpt.verify(tmp_path).notes if "if it is one of several" in each]
    assert "model_20240101120000.pt has a number" in note
    (tmp_path / "model_20240101120000.pt").unlink()
    torch.save(states, tmp_path / "optimizer_20240101120000.bin")
    with pytest.raises(SourceIncompleteError, match="but not the ones before it") as caught:
        fsdpckpt.inspect(tmp_path)
    assert caught.value.details[0] == "optimizer.bin is missing" and len(caught.value.details) == 10_000


def test_the_slices_of_one_rank_are_no_whole_optimizer(tmp_path: Path) -> None:
    sliced = {"state": {0: {"exp_avg": torch.randn(7)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save(sliced, tmp_path / "optim_1.pt")
    with pytest.raises(SourceIncompleteError, match="but those of rank 0 are missing"):
        fsdpckpt.verify(tmp_path)
