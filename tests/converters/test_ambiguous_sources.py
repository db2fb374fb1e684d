"""Checkpoints that would convert into plausible wrong bytes, were it not for what the passes ask and compare."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from tests.converters.jobs import converted, listed, notes, refused, save, states
from tests.oracle.compare import identical, require_identical
from tests.oracle.session import Oracle

UNITS = ("outer", "outer.inner")  # of the scenario "nested"; the root is one too
NAMED: dict[str, Any] = {"to": "full", "key_type": "name"}
BY_ID: dict[str, Any] = {"to": "full", "key_type": "id"}
FLAT: dict[str, Any] = {"to": "flattened", "world_size": 2}


@pytest.fixture(params=[False, True], ids=["flat", "orig"])
def orig(request: pytest.FixtureRequest) -> bool:
    return request.param


def rank_files(directory: Path | str, section: str) -> list[Any]:
    return [torch.load(path, weights_only=False) for path in sorted(Path(directory).glob(f"{section}_*.pt"))]


def require_same_ranks(found: str, expected: str) -> None:
    """The optimizers of both directories are the same."""
    held = rank_files(found, "optim")
    assert held
    require_identical(held, rank_files(expected, "optim"))


def changed(source: Path, name: str, change: Any) -> str:
    """A copy of ``source`` in which one file has another content."""
    shutil.copytree(source, "source")
    content = torch.load(Path("source", name), weights_only=False)
    change(content)
    torch.save(content, Path("source", name))
    return "source"


# Whose order it is


@pytest.fixture
def nested(oracle: Oracle) -> Path:
    return oracle.flattened(3) / "nested-flat"


@pytest.fixture
def truth(nested: Path) -> Any:
    return torch.load(nested / "truth.pt", weights_only=False)


def trained(truth: Any) -> list[str]:
    return [name for name in truth["model"] if name in truth["optimizer"]["state"]]


def test_the_groups_of_an_optimizer_alone_are_not_the_models_order(nested: Path, truth: Any, orig: bool) -> None:
    """With use_orig_params=False FSDP1 lists the root's parameters first, also those that come last in the model."""
    save(truth["optimizer"], "optim.pt")
    options: dict[str, Any] = {**FLAT, "unit": UNITS, "use_orig_params": orig, "key_type": "id"}
    error = refused(NeedsInformationError, "order", "optim.pt", "refused", **options)
    assert "--parameters" in str(error.next_step)
    options["parameters"] = listed([trained(truth)])
    fsdpckpt.convert("optim.pt", "decided", **options)
    fsdpckpt.convert(nested / "truth.pt", "whole", **options)
    require_same_ranks("decided", "whole")


def test_flat_parameters_beside_an_optimizer_by_name_do_not_say_what_the_ids_are(nested: Path, truth: Any) -> None:
    """As accelerate saves LOCAL_STATE_DICT: names come from the optimizer, which lists them unit by unit."""
    Path("local").mkdir()
    for rank in range(3):
        name = f"model_world_size_3_rank_{rank}.pt"
        shutil.copy(nested / "flat" / name, f"local/pytorch_model_fsdp_rank{rank}.bin")
    dcp.save({"optimizer": truth["optimizer"]}, checkpoint_id="local/optimizer_0", no_dist=True)
    require_identical(dict(converted("local", "names.pt", to="full")["model"]), dict(truth["model"]))
    for options in (BY_ID, FLAT):
        refused(NeedsInformationError, "order", "local", "refused", **options)
    held = states(converted("local", "ids.pt", **BY_ID, reference=save(truth["model"], "reference.pt")))
    for number, name in enumerate(trained(truth)):
        require_identical(held[number], truth["optimizer"]["state"][name], name)


def test_a_reference_in_a_dcp_directory_without_order_gives_none(nested: Path, truth: Any) -> None:
    dcp.save(dict(truth["model"]), checkpoint_id="reference", no_dist=True)
    path = Path("reference/.metadata")
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = None
    metadata.state_dict_metadata = dict(sorted(metadata.state_dict_metadata.items(), key=lambda item: item[0][::-1]))
    path.write_bytes(pickle.dumps(metadata))
    options = {**NAMED, "unit": UNITS, "reference": "reference"}
    refused(NeedsInformationError, "order", nested / "raw", "o.pt", **options)


def test_param_names_keep_the_ids_of_an_optimizer_in_an_order_of_its_own(oracle: Oracle) -> None:
    """Its groups need not follow the model: what another world size loads must have the same ids."""
    directory = oracle.flattened(3) / "nested-orig"
    truth = torch.load(directory / "truth.pt", weights_only=False)
    names = trained(truth)[::-1]
    Path("source").mkdir()
    for rank in range(3):
        name = f"optim_world_size_3_rank_{rank}.pt"
        held = torch.load(directory / "raw" / name, weights_only=False)
        (group,) = held["param_groups"]
        group["param_names"] = names  # the optimizer was given the list reversed
        held["state"] = {len(names) - 1 - old: entry for old, entry in held["state"].items()}
        torch.save(held, Path("source", name))
    options: dict[str, Any] = {"unit": UNITS, "reference": save(truth["model"], "reference.pt")}
    fsdpckpt.convert("source", "two", **FLAT, use_orig_params=True, **options)
    for source, more in (("source", options), ("two", {})):
        found = converted(source, f"{source}.pt", to="full", **more)["optimizer"]
        assert found["param_groups"][0]["param_names"] == names
        for number, name in enumerate(names):
            require_identical(found["state"][number], truth["optimizer"]["state"][name], name)


def test_a_torch_file_whose_keys_a_tool_sorted_is_no_order_either() -> None:
    names = [f"layers.{number}.weight" for number in range(12)]
    held = {number: {"exp_avg": torch.randn(4, 4)} for number in range(12)}
    save({"state": held, "param_groups": [{"params": list(range(12))}]}, "optim.pt")
    model = {name: torch.randn(4, 4) for name in names}
    save({name: model[name] for name in sorted(names)}, "sorted.pt")
    refused(NeedsInformationError, "", "optim.pt", "o.pt", reference="sorted.pt", **NAMED)
    fsdpckpt.convert("optim.pt", "o.pt", reference=save(model, "model.pt"), **NAMED)


# Settings of the target


def test_a_cast_of_the_weights_decides_how_the_target_is_aligned(oracle: Oracle) -> None:
    directory = oracle.flattened(3) / "nested-orig"
    fsdpckpt.convert(directory / "flat", "cast", **FLAT, dtype="bfloat16")
    units = json.loads((directory / "units.json").read_text().replace("float32", "bfloat16"))
    Path("units.json").write_text(json.dumps({**units, "world_size": None}))
    options = {**FLAT, "dtype": "bfloat16", "key_type": "id", "units": "units.json"}
    fsdpckpt.convert(directory / "truth.pt", "given", **options)
    for rank in range(2):
        name = f"model_world_size_2_rank_{rank}.pt"
        assert Path("cast", name).read_bytes() == Path("given", name).read_bytes()
    require_same_ranks("cast", "given")


def test_the_units_file_of_a_job_on_other_ranks_serves_source_and_target(
    oracle: Oracle, nested: Path, orig: bool
) -> None:
    """What ``save_units`` wrote in the job that will load the files records that job's ranks, not the source's."""
    units = oracle.flattened(2) / ("nested-orig" if orig else "nested-flat") / "units.json"
    fsdpckpt.convert(nested / "raw", "slices", **FLAT, units=units, key_type="id")
    fsdpckpt.convert(nested / "truth.pt", "whole", **FLAT, units=units, key_type="id", only="optim")
    require_same_ranks("slices", "whole")


# What ranks disagree on, and what has no place


@pytest.mark.parametrize("variant", ["nested-flat", "nested-orig", "no_shard-flat", "no_shard-orig"])
def test_ranks_that_count_other_steps_are_refused_and_listed(oracle: Oracle, variant: str) -> None:
    def count_on(content: Any) -> None:
        for entry in content["state"].values():
            entry["step"] = entry["step"] + 1

    changed(oracle.flattened(3) / variant / "flat", "optim_world_size_3_rank_1.pt", count_on)
    error = refused(SourceCorruptError, "", "source", "o.pt", to="full")
    assert "rank 0 and of rank 1" in error.details[0]
    assert not fsdpckpt.verify("source").whole


def test_of_a_buffer_that_differs_between_ranks_the_lowest_ranks_copy_is_taken_if_it_is_known_to_be_one(
    oracle: Oracle,
) -> None:
    source = oracle.checkpoints(2) / "f2_ranks"
    changed(source, "model_world_size_2_rank_1.pt", lambda content: content["scale"].add_(1))
    words = "cannot tell whether one rank's copy of 1 model tensor"
    error = refused(NeedsInformationError, words, "source", "o.pt")
    assert error.exit_code == 4 and "--buffers" in str(error.next_step)
    report = fsdpckpt.convert("source", "o.pt", buffers=["scale"])
    assert identical(torch.load("o.pt")["model"]["scale"], rank_files(source, "model")[0]["scale"])
    assert not notes(report, "unused")
    (note,) = notes(report, "replicas")
    assert note.message == "1 model key differs between ranks; the lowest rank's copy is used: scale"


def test_what_ranks_disagree_on_is_named_with_what_each_has(oracle: Oracle) -> None:
    source, name = oracle.checkpoints(2) / "f2_ranks", "optim_world_size_2_rank_1.pt"
    changed(source, name, lambda content: content["param_groups"][0].update(lr=0.75))
    words = r"lr is not the same on every rank: .* on rank 0; 0\.75 on rank 1"
    refused(SourceCorruptError, words, "source", "o.pt")


def test_verify_lists_what_contradicts_the_units_beside_the_files(nested: Path) -> None:
    def lose(content: Any) -> None:
        del content["state"][1]["exp_avg"], content["state"][2]

    changed(nested / "flat", "optim_world_size_3_rank_2.pt", lose)
    assert len([problem for problem in fsdpckpt.verify("source").problems if problem.kind == "units"]) == 3
    refused(SourceCorruptError, "", "source", "o.pt", to="full")


def test_parameters_without_state_are_said(oracle: Oracle) -> None:
    report = fsdpckpt.convert(oracle.flattened(3) / "unused-orig" / "flat", "o.pt", **NAMED)
    (note,) = notes(report, "missing-state")
    held = torch.load("o.pt")["optimizer"]
    assert set(note.keys) == set(held["param_groups"][0]["params"]) - set(held["state"])


@pytest.mark.parametrize("world_size", [1, 2, 40])
def test_a_parameter_without_elements_and_a_step_of_one_element_survive(world_size: int, orig: bool) -> None:
    """On 40 ranks each shard has one element, like the steps, which are no slices for that."""
    shapes = {"a": (5, 3), "c": (7,), "b.none": (0, 4), "b.one": (1, 1), "b.two": (2, 3)}
    held = {name: {"step": torch.tensor([3.0]), "exp_avg": torch.randn(shape)} for name, shape in shapes.items()}
    held["b.none"]["step"] = torch.tensor([0.0])  # as Adagrad, which makes states at once, never counts it
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    save({"model": weights, "optimizer": {"state": held, "param_groups": [{"params": list(shapes)}]}})
    options = {"unit": ("b",), "use_orig_params": orig, "parameters": listed([shapes])}
    flat: dict[str, Any] = {"to": "flattened", "verify": "full"}
    report = fsdpckpt.convert("source.pt", "flat", **flat, world_size=world_size, **options)
    kept = orig and world_size == 1  # NO_SHARD, which leaves each parameter its own states
    assert [note.keys for note in notes(report, "dropped")] == ([] if kept else [("b.none",)])
    fsdpckpt.convert("flat", "other", **flat, world_size=3, use_orig_params=not orig)
    found = converted("other", "back.pt", **NAMED)
    require_identical(dict(found["model"]), weights)
    for name in set(shapes) - {"b.none"}:
        require_identical(states(found)[name], held[name], name)
