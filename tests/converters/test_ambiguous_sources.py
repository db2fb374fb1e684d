"""Checkpoints that would convert into plausible wrong bytes, were it not for what the passes ask and compare."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from tests.oracle.compare import differences, identical
from tests.oracle.session import Oracle

UNITS = ("outer", "outer.inner")  # of the scenario "nested"; the root is one too


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def rank_files(directory: Path, section: str) -> list[Any]:
    return [loaded(path) for path in sorted(directory.glob(f"{section}_*.pt"))]


def parameters(path: Path, truth: Any) -> Path:
    path.write_text("\n".join(name for name in truth["model"] if name in truth["optimizer"]["state"]))
    return path


# Whose order it is.


@pytest.mark.parametrize("orig", [False, True])
def test_the_groups_of_an_optimizer_alone_are_not_the_models_order(oracle: Oracle, tmp_path: Path, orig: bool) -> None:
    """With use_orig_params=False FSDP1 lists the root's parameters first, also those that come last in the model."""
    truth = oracle.flattened(3) / "nested-flat" / "truth.pt"
    content = loaded(truth)
    source = tmp_path / "alone" / "optim.pt"
    source.parent.mkdir()
    torch.save(content["optimizer"], source)
    options: dict[str, Any] = {"to": "flattened", "world_size": 2, "unit": UNITS, "use_orig_params": orig}
    with pytest.raises(NeedsInformationError, match="order") as caught:
        fsdpckpt.convert(source, tmp_path / "refused", key_type="id", **options)
    assert "--parameters" in str(caught.value.next_step)
    options["parameters"] = parameters(tmp_path / "names.txt", content)
    fsdpckpt.convert(source, tmp_path / "decided", key_type="id", **options)
    fsdpckpt.convert(truth, tmp_path / "whole", key_type="id", **options)
    for found, expected in zip(
        rank_files(tmp_path / "decided", "optim"), rank_files(tmp_path / "whole", "optim"), strict=True
    ):
        assert differences(found, expected) == []


def test_flat_parameters_beside_an_optimizer_by_name_do_not_say_what_the_ids_are(
    oracle: Oracle, tmp_path: Path
) -> None:
    """As accelerate saves LOCAL_STATE_DICT: names come from the optimizer, which lists them unit by unit."""
    directory = oracle.flattened(3) / "nested-flat"
    content = loaded(directory / "truth.pt")
    source = tmp_path / "local"
    source.mkdir()
    for rank in range(3):
        name = f"model_world_size_3_rank_{rank}.pt"
        shutil.copy(directory / "flat" / name, source / f"pytorch_model_fsdp_rank{rank}.bin")
    dcp.save({"optimizer": content["optimizer"]}, checkpoint_id=source / "optimizer_0", no_dist=True)
    fsdpckpt.convert(source, tmp_path / "names.pt", to="full")
    found = loaded(tmp_path / "names.pt")
    assert differences(dict(found["model"]), dict(content["model"])) == []
    for options in ({"to": "full", "key_type": "id"}, {"to": "flattened", "world_size": 2}):
        with pytest.raises(NeedsInformationError, match="order"):
            fsdpckpt.convert(source, tmp_path / "refused", **options)
    torch.save(content["model"], tmp_path / "reference.pt")
    fsdpckpt.convert(source, tmp_path / "ids.pt", to="full", key_type="id", reference=tmp_path / "reference.pt")
    states = loaded(tmp_path / "ids.pt")["optimizer"]["state"]
    for number, name in enumerate(name for name in content["model"] if name in content["optimizer"]["state"]):
        assert differences(states[number], content["optimizer"]["state"][name]) == [], name


def test_a_reference_in_a_dcp_directory_without_order_gives_none(oracle: Oracle, tmp_path: Path) -> None:
    import pickle

    directory = oracle.flattened(3) / "nested-flat"
    weights = loaded(directory / "truth.pt")["model"]
    dcp.save(dict(weights), checkpoint_id=tmp_path / "reference", no_dist=True)
    path = tmp_path / "reference" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = None
    metadata.state_dict_metadata = dict(sorted(metadata.state_dict_metadata.items(), key=lambda item: item[0][::-1]))
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(NeedsInformationError, match="order"):
        fsdpckpt.convert(
            directory / "raw",
            tmp_path / "o.pt",
            to="full",
            key_type="name",
            unit=UNITS,
            reference=tmp_path / "reference",
        )


def test_param_names_keep_the_ids_of_an_optimizer_in_an_order_of_its_own(oracle: Oracle, tmp_path: Path) -> None:
    """Its groups need not follow the model: what another world size loads must have the same ids."""
    directory = oracle.flattened(3) / "nested-orig"
    content = loaded(directory / "truth.pt")
    names = [name for name in content["model"] if name in content["optimizer"]["state"]]
    source = tmp_path / "source"
    source.mkdir()
    for rank in range(3):
        states = loaded(directory / "raw" / f"optim_world_size_3_rank_{rank}.pt")
        (group,) = states["param_groups"]
        number = {old: len(names) - 1 - old for old in group["params"]}  # the optimizer was given the list reversed
        group["param_names"] = names[::-1]
        states["state"] = {number[old]: entry for old, entry in states["state"].items()}
        torch.save(states, source / f"optim_world_size_3_rank_{rank}.pt")
    torch.save(content["model"], tmp_path / "reference.pt")
    options: dict[str, Any] = {"unit": UNITS, "reference": tmp_path / "reference.pt"}
    fsdpckpt.convert(source, tmp_path / "two", to="flattened", world_size=2, use_orig_params=True, **options)
    for slices, more in ((source, options), (tmp_path / "two", {})):
        fsdpckpt.convert(slices, tmp_path / "full.pt", to="full", overwrite=True, **more)
        found = loaded(tmp_path / "full.pt")["optimizer"]
        assert found["param_groups"][0]["param_names"] == names[::-1]
        for number, name in enumerate(names[::-1]):
            assert differences(found["state"][number], content["optimizer"]["state"][name]) == [], name


def test_a_torch_file_whose_keys_a_tool_sorted_is_no_order_either(tmp_path: Path) -> None:
    names = [f"layers.{number}.weight" for number in range(12)]
    states = {number: {"exp_avg": torch.randn(4, 4)} for number in range(12)}
    (tmp_path / "source").mkdir()
    torch.save({"state": states, "param_groups": [{"params": list(range(12))}]}, tmp_path / "source" / "optim.pt")
    torch.save({name: torch.randn(4, 4) for name in sorted(names)}, tmp_path / "sorted.pt")
    options: dict[str, Any] = {"to": "full", "key_type": "name"}
    with pytest.raises(NeedsInformationError):
        fsdpckpt.convert(tmp_path / "source", tmp_path / "o.pt", reference=tmp_path / "sorted.pt", **options)
    torch.save({name: torch.randn(4, 4) for name in names}, tmp_path / "model.pt")
    fsdpckpt.convert(tmp_path / "source", tmp_path / "o.pt", reference=tmp_path / "model.pt", **options)


# Settings of the target.


def test_a_cast_of_the_weights_decides_how_the_target_is_aligned(oracle: Oracle, tmp_path: Path) -> None:
    directory = oracle.flattened(3) / "nested-orig"
    fsdpckpt.convert(directory / "flat", tmp_path / "cast", to="flattened", world_size=2, dtype="bfloat16")
    units = json.loads((directory / "units.json").read_text().replace("float32", "bfloat16"))
    (tmp_path / "units.json").write_text(json.dumps({**units, "world_size": None}))
    fsdpckpt.convert(
        directory / "truth.pt", tmp_path / "given", to="flattened", world_size=2, dtype="bfloat16", key_type="id",
        units=tmp_path / "units.json",
    )  # fmt: skip
    for rank in range(2):
        name = f"model_world_size_2_rank_{rank}.pt"
        assert (tmp_path / "cast" / name).read_bytes() == (tmp_path / "given" / name).read_bytes()
    pairs = zip(rank_files(tmp_path / "cast", "optim"), rank_files(tmp_path / "given", "optim"), strict=True)
    assert all(differences(found, expected) == [] for found, expected in pairs)


@pytest.mark.parametrize("orig", [False, True])
def test_the_units_file_of_a_job_on_other_ranks_serves_source_and_target(
    oracle: Oracle, tmp_path: Path, orig: bool
) -> None:
    """What ``save_units`` wrote in the job that will load the files records that job's ranks, not the source's."""
    source = oracle.flattened(3) / "nested-flat"
    target = oracle.flattened(2) / ("nested-orig" if orig else "nested-flat") / "units.json"
    options: dict[str, Any] = {"to": "flattened", "world_size": 2, "units": target, "key_type": "id"}
    fsdpckpt.convert(source / "raw", tmp_path / "slices", **options)
    fsdpckpt.convert(source / "truth.pt", tmp_path / "whole", only="optim", **options)
    pairs = zip(rank_files(tmp_path / "slices", "optim"), rank_files(tmp_path / "whole", "optim"), strict=True)
    assert all(differences(found, expected) == [] for found, expected in pairs)


# What ranks disagree on, and what has no place.


@pytest.mark.parametrize("variant", ["nested-flat", "nested-orig", "no_shard-flat", "no_shard-orig"])
def test_ranks_that_count_other_steps_are_refused_and_listed(oracle: Oracle, tmp_path: Path, variant: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(oracle.flattened(3) / variant / "flat", source)
    path = source / "optim_world_size_3_rank_1.pt"
    states = loaded(path)
    for entry in states["state"].values():
        entry["step"] = entry["step"] + 1
    torch.save(states, path)
    with pytest.raises(SourceCorruptError) as caught:
        fsdpckpt.convert(source, tmp_path / "o.pt", to="full")
    assert "rank 0 and of rank 1" in caught.value.details[0]
    assert not fsdpckpt.verify(source).whole


def test_of_a_buffer_that_differs_between_ranks_the_lowest_ranks_copy_is_taken_if_it_is_known_to_be_one(
    oracle: Oracle, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(oracle.checkpoints(2) / "f2_ranks", source)
    first, second = rank_files(source, "model")
    second["scale"] += 1
    torch.save(second, source / "model_world_size_2_rank_1.pt")
    with pytest.raises(NeedsInformationError, match="cannot tell whether one rank's copy of 1 model tensor") as error:
        fsdpckpt.convert(source, tmp_path / "o.pt")
    assert error.value.exit_code == 4 and "--buffers" in str(error.value.next_step) and not (tmp_path / "o.pt").exists()
    report = fsdpckpt.convert(source, tmp_path / "o.pt", buffers=["scale"])
    assert identical(torch.load(tmp_path / "o.pt")["model"]["scale"], first["scale"])
    assert not [note for note in report.notes if note.kind == "unused"]
    (note,) = [note for note in report.notes if note.kind == "replicas"]
    assert note.message == "1 model key differs between ranks; the lowest rank's copy is used: scale"


def test_what_ranks_disagree_on_is_named_with_what_each_has(oracle: Oracle, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(oracle.checkpoints(2) / "f2_ranks", source)
    path = source / "optim_world_size_2_rank_1.pt"
    states = loaded(path)
    states["param_groups"][0]["lr"] = 0.75
    torch.save(states, path)
    with pytest.raises(SourceCorruptError, match=r"lr is not the same on every rank: .* on rank 0; 0\.75 on rank 1"):
        fsdpckpt.convert(source, tmp_path / "o.pt")


def test_verify_lists_what_contradicts_the_units_beside_the_files(oracle: Oracle, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(oracle.flattened(3) / "nested-flat" / "flat", source)
    path = source / "optim_world_size_3_rank_2.pt"
    states = loaded(path)
    del states["state"][1]["exp_avg"], states["state"][2]
    torch.save(states, path)
    found = [problem.message for problem in fsdpckpt.verify(source).problems if problem.kind == "units"]
    assert len(found) == 3
    with pytest.raises(SourceCorruptError):
        fsdpckpt.convert(source, tmp_path / "o.pt", to="full")


def test_parameters_without_state_are_said(oracle: Oracle, tmp_path: Path) -> None:
    source = oracle.flattened(3) / "unused-orig" / "flat"
    report = fsdpckpt.convert(source, tmp_path / "o.pt", to="full", key_type="name")
    (note,) = [note for note in report.notes if note.kind == "missing-state"]
    states = loaded(tmp_path / "o.pt")["optimizer"]
    assert set(note.keys) == set(states["param_groups"][0]["params"]) - set(states["state"])


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 40])
def test_a_parameter_without_elements_and_a_step_of_one_element_survive(
    tmp_path: Path, world_size: int, orig: bool
) -> None:
    """On 40 ranks each shard has one element, like the steps, which are no slices for that."""
    shapes = {"a": (5, 3), "c": (7,), "b.none": (0, 4), "b.one": (1, 1), "b.two": (2, 3)}
    states = {name: {"step": torch.tensor([3.0]), "exp_avg": torch.randn(shape)} for name, shape in shapes.items()}
    states["b.none"]["step"] = torch.tensor([0.0])  # as Adagrad, which makes states at once, never counts it
    weights = {name: torch.randn(shape) for name, shape in shapes.items()}
    content = {"model": weights, "optimizer": {"state": states, "param_groups": [{"params": list(shapes)}]}}
    torch.save(content, tmp_path / "source.pt")
    (tmp_path / "names.txt").write_text("\n".join(shapes))
    report = fsdpckpt.convert(
        tmp_path / "source.pt", tmp_path / "flat", to="flattened", world_size=world_size, unit=("b",),
        use_orig_params=orig, parameters=tmp_path / "names.txt", verify="full",
    )  # fmt: skip
    kept = orig and world_size == 1  # NO_SHARD, which leaves each parameter its own states
    assert [note.keys for note in report.notes if note.kind == "dropped"] == ([] if kept else [("b.none",)])
    fsdpckpt.convert(
        tmp_path / "flat", tmp_path / "other", to="flattened", world_size=3, use_orig_params=not orig, verify="full"
    )
    fsdpckpt.convert(tmp_path / "other", tmp_path / "back.pt", to="full", key_type="name")
    found = loaded(tmp_path / "back.pt")
    assert differences(dict(found["model"]), weights) == []
    for name in set(shapes) - {"b.none"}:
        assert differences(found["optimizer"]["state"][name], states[name]) == [], name
