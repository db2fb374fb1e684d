"""Ids of the model that a map makes: those that its own optimizer gives, or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from tests.maps import experts
from tests.maps.experts import State
from tests.oracle.compare import identical


def convert(tmp_path: Path, source: str, target: str, **options: Any) -> Path:
    fsdpckpt.convert(tmp_path / source, tmp_path / target, map=tmp_path / "experts.toml", verify="full", **options)
    return tmp_path / target


def listed(model: torch.nn.Module, path: Path) -> Path:
    """The file that a user writes: the parameters as the optimizer of ``model`` lists them, group by group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = experts.optimizer_of(model).param_groups
    path.write_text("\n\n".join("\n".join(names[id(each)] for each in group["params"]) for group in groups))
    return path


def assert_resumes(path: Path, saved: State) -> None:
    """``path`` is loaded by a fresh optimizer of the other model, by position alone, and each state is the one of its
    parameter.
    """
    model = experts.fused()
    optimizer = experts.optimizer_of(model)
    state = torch.load(path)
    for group in state["optimizer"]["param_groups"]:
        group.pop("param_names", None)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for name in ("exp_avg", "exp_avg_sq"):
        expected = experts.written_out({key: entry[name] for key, entry in saved["optimizer"]["state"].items()})
        for key, parameter in model.named_parameters():
            assert identical(optimizer.state[parameter][name], expected[key]), key
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.005]


@pytest.mark.parametrize("source", ["apart.pt", "ids.pt"])
@pytest.mark.parametrize("known", ["parameters", "reference"])
def test_ids_are_those_of_the_new_models_optimizer(tmp_path: Path, saved: State, source: str, known: str) -> None:
    fsdpckpt.convert(tmp_path / "apart.pt", tmp_path / "ids.pt", key_type="id")
    model = experts.fused()
    torch.save({"model": model.state_dict()}, tmp_path / "reference.pt")
    options: dict[str, Any] = {"reference": tmp_path / "reference.pt"}
    if known == "parameters":
        options = {"parameters": listed(model, tmp_path / "names.txt")}
    assert_resumes(convert(tmp_path, source, "fused.pt", key_type="id", **options), saved)
    if source == "ids.pt":  # the source's keys are the default
        assert_resumes(convert(tmp_path, source, "default.pt", **options), saved)


def test_an_optimizer_in_another_order_than_the_model_is_followed(tmp_path: Path, saved: State) -> None:
    """The reference is a checkpoint of the new job, whose groups say in which order it gave its parameters."""
    names = [name for name, _ in experts.fused().named_parameters()]
    routers = [name for name in names if "router" in name][::-1]
    others = [name for name in names if "router" not in name][::-1]
    groups = [{"params": others, "lr": 0.01}, {"params": routers, "lr": 0.005}]
    job = {"model": experts.fused().state_dict(), "optimizer": {"state": {}, "param_groups": groups}}
    torch.save(job, tmp_path / "job.pt")
    made = torch.load(convert(tmp_path, "apart.pt", "fused.pt", key_type="id", reference=tmp_path / "job.pt"))
    expected = experts.written_out({key: entry["exp_avg"] for key, entry in saved["optimizer"]["state"].items()})
    for number, name in enumerate([*others, *routers]):
        assert identical(made["optimizer"]["state"][number]["exp_avg"], expected[name]), name


def test_each_option_describes_the_model_whose_names_it_has(tmp_path: Path, saved: State) -> None:
    """There and back, by ids: a reference of one of the models, and the list of the other."""
    fsdpckpt.convert(tmp_path / "apart.pt", tmp_path / "ids.pt", key_type="id")
    torch.save({"model": experts.fused().state_dict()}, tmp_path / "reference.pt")
    known = {"parameters": listed(experts.apart(), tmp_path / "names.txt"), "reference": tmp_path / "reference.pt"}
    convert(tmp_path, "ids.pt", "fused.pt", **known)
    assert_resumes(tmp_path / "fused.pt", saved)
    convert(tmp_path, "fused.pt", "again.pt", **known, inverse=True)
    assert fsdpckpt.diff(tmp_path / "ids.pt", tmp_path / "again.pt").same


@pytest.mark.parametrize("given", ["nothing", "parameters", "reference"])
def test_without_the_order_of_the_new_model_ids_are_refused(tmp_path: Path, saved: State, given: str) -> None:
    """Also with the names of the old model, which say what the source's ids are."""
    listed(experts.apart(), tmp_path / "names.txt")
    options: dict[str, Any] = {"parameters": {"parameters": tmp_path / "names.txt"}}.get(given, {})
    if given == "reference":
        options = {"reference": tmp_path / "apart.pt"}
    with pytest.raises(NeedsInformationError, match=r"parameters=FILE") as refused:
        convert(tmp_path, "apart.pt", "fused.pt", key_type="id", **options)
    assert "key_type='name'" in str(refused.value)


def test_a_list_that_lacks_a_new_parameter_is_refused_and_one_that_no_id_needs_has_no_effect(
    tmp_path: Path, saved: State
) -> None:
    path = listed(experts.fused(), tmp_path / "names.txt")
    report = fsdpckpt.convert(
        tmp_path / "apart.pt", tmp_path / "fused.pt", map=tmp_path / "experts.toml", parameters=path
    )
    assert [note.message for note in report.notes if note.kind == "unused"] == [
        "--parameters had no effect: it lists the parameters of the new model, whose optimizer has no ids"
    ]
    path.write_text(path.read_text().replace("blocks.1.down\n", ""))
    with pytest.raises(SourceCorruptError, match=r"blocks\.1\.down"):
        convert(tmp_path, "apart.pt", "ids.pt", key_type="id", parameters=path)


RENAME = """
format = 1
rest = "keep"

[[rule]]
from = "blocks.{block}.gate_up"
to = "decoder.layers.{block}.experts.w13"
steps = [{ transpose = [1, 2] }]

[[rule]]
from = "tokens.weight"
to = "tokens.table"
steps = [{ rearrange = "(a b) d -> a b d", axes = { b = "rows" } }]

[values]
rows = ["nothing"]
"""


def test_several_maps_are_one_after_the_other_and_back_the_last_one_first(tmp_path: Path, saved: State) -> None:
    (tmp_path / "rename.toml").write_text(RENAME)
    both: dict[str, Any] = {"map": [tmp_path / "experts.toml", tmp_path / "rename.toml"], "map_value": {"rows": 1}}
    fsdpckpt.convert(tmp_path / "apart.pt", tmp_path / "at-once", world_size=3, to="sharded", **both)
    fsdpckpt.convert(tmp_path / "apart.pt", tmp_path / "first.pt", map=tmp_path / "experts.toml")
    second: dict[str, Any] = {"map": [tmp_path / "rename.toml"], "map_value": {"rows": 1}}
    fsdpckpt.convert(tmp_path / "first.pt", tmp_path / "second.pt", **second)
    assert fsdpckpt.diff(tmp_path / "at-once", tmp_path / "second.pt").same
    model = torch.load(tmp_path / "second.pt")["model"]
    expected = experts.written_out(saved["model"])["blocks.1.gate_up"].transpose(1, 2)
    assert identical(model["decoder.layers.1.experts.w13"], expected)
    fsdpckpt.convert(tmp_path / "at-once", tmp_path / "back.pt", to="full", inverse=True, **both)
    # What was one parameter is listed at one place: which experts' gates stood between others is not known any more.
    different = fsdpckpt.diff(tmp_path / "apart.pt", tmp_path / "back.pt").entries
    assert [entry.key for entry in different if entry.sigil != "="] == ["param_groups.0.params"]
    recorded = fsdpckpt.convert(tmp_path / "apart.pt", tmp_path / "recorded", container="dcp", to="sharded", **both)
    text = (tmp_path / "recorded" / "fsdpckpt.json").read_text()
    assert text.index("experts.toml") < text.index("rename.toml") and len(recorded.notes) > 1
