"""Flat shards to flat shards with every option that changes names, selects, casts or fills.

The truth: the same is done to the full state dicts in plain Python, and these are flattened with a wrapping of the new
names. Flat shards made in one step are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, UsageError
from tests.oracle.compare import differences, require_identical

Named = dict[str, Any]
RANKS = 3


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Named:
    """A model, and its optimizer by name in two groups that do not follow the model's order."""
    torch.manual_seed(3)
    layers = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 3)])
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "layers": layers, "norm": nn.LayerNorm(3)})
    names = {parameter: name for name, parameter in model.named_parameters()}
    vectors = [parameter for parameter in names if parameter.ndim == 1]
    matrices = [parameter for parameter in names if parameter.ndim > 1]
    optimizer = torch.optim.AdamW(
        [{"params": vectors[::-1], "weight_decay": 0.0}, {"params": matrices}], lr=1e-2, foreach=False
    )
    for parameter in names:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    content = optimizer.state_dict()
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    groups = [{**group, "params": [order[number] for number in group["params"]]} for group in content["param_groups"]]
    state = {order[number]: states for number, states in content["state"].items()}
    return {"model": model.state_dict(), "optimizer": {"state": state, "param_groups": groups}}


def flattened(content: Named, directory: Path, *, orig: bool, world_size: int, layers: str, **options: Any) -> Path:
    torch.save(content, directory.with_suffix(".pt"))
    fsdpckpt.convert(
        directory.with_suffix(".pt"),
        directory,
        to="flattened",
        world_size=world_size,
        unit=layers,
        use_orig_params=orig,
        **{**({"key_type": "id"} if options.get("only") != "model" else {}), **options},
    )
    return directory


def mapped(content: Named, new_name: Callable[[str], str | None]) -> Named:
    """``content`` under new names, without those of which there is none."""

    def renamed(named: Named) -> Named:
        return {new: value for name, value in named.items() if (new := new_name(name)) is not None}

    optimizer = content["optimizer"]
    groups = [
        {**group, "params": [new for name in group["params"] if (new := new_name(name)) is not None]}
        for group in optimizer["param_groups"]
    ]
    return {
        "model": renamed(content["model"]),
        "optimizer": {"state": renamed(optimizer["state"]), "param_groups": groups},
    }


def require_same(found: Path, expected: Path) -> None:
    """Both directories hold the same files: the model's byte for byte, the optimizer's by value."""
    names = sorted(path.name for path in expected.glob("*.pt"))
    assert sorted(path.name for path in found.glob("*.pt")) == names
    for name in names:
        if name.startswith("model"):
            assert (found / name).read_bytes() == (expected / name).read_bytes(), name
        else:
            one, other = (torch.load(path / name, weights_only=True) for path in (found, expected))
            assert not differences(one, other), name


NAMES: dict[str, tuple[Named, Callable[[str], str | None], str]] = {
    "a prefix more": ({"add_prefix": "net."}, lambda name: f"net.{name}", "net.layers.*"),
    "a prefix less": (
        {"strip_prefix": "layers."},
        lambda name: name.removeprefix("layers."),
        "[01]",
    ),
    "a module renamed": (
        {"rename": {"layers": "blocks", "norm.weight": "norm.gain"}},
        lambda name: name.replace("layers", "blocks").replace("norm.weight", "norm.gain"),
        "blocks.*",
    ),
    "a unit left out": (
        {"exclude": ["layers.0.*"]},
        lambda name: None if name.startswith("layers.0.") else name,
        "layers.*",
    ),
    "a part of every unit, under another name": (
        {"include": ["*.weight"], "rename": [("layers.1", "last")]},
        lambda name: name.replace("layers.1", "last") if name.endswith(".weight") else None,
        "la*",
    ),
}


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("case", NAMES)
def test_names_change_as_they_do_through_a_full_checkpoint(case: str, orig: bool, full: Named, tmp_path: Path) -> None:
    options, new_name, layers = NAMES[case]
    if case.startswith("a part"):
        layers = "**"
    content = full if orig else _one_group(full)
    flat = flattened(content, tmp_path / "flat", orig=orig, world_size=2, layers="layers.*")
    wanted = mapped(content, new_name)
    expected = flattened(
        wanted,
        tmp_path / "expected",
        orig=orig,
        world_size=RANKS,
        layers=["layers.0", "last"] if case.startswith("a part") else layers,
    )
    fsdpckpt.convert(flat, tmp_path / "found", to="flattened", world_size=RANKS, **options)
    require_same(tmp_path / "found", expected)
    recorded, truth = (
        json.loads((path / "fsdpckpt.json").read_text())["units"] for path in (tmp_path / "found", expected)
    )
    assert recorded == truth


def _one_group(content: Named) -> Named:
    """With ``use_orig_params=False`` a flat parameter is in one group."""
    first, *_ = content["optimizer"]["param_groups"]
    group = {**first, "params": list(content["optimizer"]["state"])}
    return {**content, "optimizer": {**content["optimizer"], "param_groups": [group]}}


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"optim_dtype": "bfloat16"},
        {"key_type": "name"},
        {"missing_state": "zeros"},
        {"clean_names": True, "rename": {"norm": "last"}},
    ],
    ids=str,
)
def test_every_other_option_does_what_it_does_to_a_full_checkpoint(options: Named, full: Named, tmp_path: Path) -> None:
    content = full
    if "missing_state" in options:
        state = {name: entry for name, entry in full["optimizer"]["state"].items() if name != "norm.bias"}
        content = {**full, "optimizer": {**full["optimizer"], "state": state}}
    flat = flattened(content, tmp_path / "flat", orig=True, world_size=2, layers="layers.*")
    expected = flattened(content, tmp_path / "expected", orig=True, world_size=RANKS, layers="layers.*", **options)
    fsdpckpt.convert(flat, tmp_path / "found", to="flattened", world_size=RANKS, **options)
    require_same(tmp_path / "found", expected)


@pytest.mark.parametrize("section", ["model", "optim"])
def test_one_section_alone_gets_the_new_names_too(section: str, full: Named, tmp_path: Path) -> None:
    flat = flattened(full, tmp_path / "flat", orig=True, world_size=2, layers="layers.*")
    wanted = mapped(full, lambda name: f"net.{name}")
    expected = flattened(wanted, tmp_path / "expected", orig=True, world_size=RANKS, layers="net.layers.*")
    for path in expected.glob("*.pt"):
        if not path.name.startswith(section):
            path.unlink()
    fsdpckpt.convert(flat, tmp_path / "found", to="flattened", world_size=RANKS, only=section, add_prefix="net.")
    require_same(tmp_path / "found", expected)


@pytest.mark.parametrize("orig", [True, False])
def test_param_names_and_the_place_of_buffers_are_those_of_the_new_names_too(orig: bool, tmp_path: Path) -> None:
    layers = nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3)])
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "layers": layers})
    optimizer = torch.optim.AdamW(model.named_parameters(), foreach=False)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    buffers = {"buffers": ["*running*"]}
    flat = flattened(content, tmp_path / "flat", orig=orig, world_size=2, layers="layers.*", **buffers)
    options = {"rename": {"layers": "blocks"}, "add_prefix": "net."}
    fsdpckpt.convert(flat, tmp_path / "found", to="flattened", world_size=RANKS, **options)
    renamed = nn.ModuleDict({"net": nn.ModuleDict({"embed": model["embed"], "blocks": layers})})
    named = torch.optim.AdamW(renamed.named_parameters(), foreach=False)
    named.load_state_dict(optimizer.state_dict())
    again = {"model": renamed.state_dict(), "optimizer": named.state_dict()}
    again["optimizer"]["param_groups"][0]["param_names"] = [name for name, _ in renamed.named_parameters()]
    expected = flattened(
        again, tmp_path / "expected", orig=orig, world_size=RANKS, layers="net.blocks.*", buffers=["*running*"]
    )
    for rank in range(RANKS):
        name = f"optim_world_size_{RANKS}_rank_{rank}.pt"
        one, other = (torch.load(path / name, weights_only=True) for path in (tmp_path / "found", expected))
        assert not differences(one, other)
    assert fsdpckpt.diff(tmp_path / "found", expected).same


@pytest.mark.parametrize("orig", [True, False])
def test_the_optimizer_alone_is_cut_by_the_model_that_is_left_out(orig: bool, full: Named, tmp_path: Path) -> None:
    content = mapped(full if orig else _one_group(full), lambda name: f"net.{name}")
    expected = flattened(content, tmp_path / "expected", orig=orig, world_size=RANKS, layers="net.layers.*")
    for path in expected.glob("model*.pt"):
        path.unlink()
    source = full if orig else _one_group(full)
    alone = {"only": "optim", "add_prefix": "net."}
    found = flattened(source, tmp_path / "found", orig=orig, world_size=RANKS, layers="net.layers.*", **alone)
    require_same(found, expected)


def test_what_is_given_of_the_units_may_have_the_sources_names_or_the_targets(full: Named, tmp_path: Path) -> None:
    flat = flattened(full, tmp_path / "flat", orig=True, world_size=2, layers="layers.*")
    new = flattened(
        mapped(full, lambda name: f"net.{name}"), tmp_path / "new", orig=True, world_size=RANKS, layers="net.layers.*"
    )
    for number, source in enumerate((flat, new)):
        units = tmp_path / f"units{number}.json"
        units.write_text(json.dumps(json.loads((source / "fsdpckpt.json").read_text())["units"]))
        target = tmp_path / f"found{number}"
        fsdpckpt.convert(flat, target, to="flattened", world_size=RANKS, add_prefix="net.", units=units)
        require_same(target, new)
    (tmp_path / "order").write_text("".join(f"{name}\n" for name in full["model"]))
    fsdpckpt.convert(
        flat,
        tmp_path / "listed",
        to="flattened",
        world_size=RANKS,
        add_prefix="net.",
        reference=tmp_path / "flat.pt",
        parameters=tmp_path / "order",
    )
    require_same(tmp_path / "listed", new)


def test_a_glob_that_matches_no_module_under_either_name_is_refused(full: Named, tmp_path: Path) -> None:
    flat = flattened(full, tmp_path / "flat", orig=True, world_size=2, layers="layers.*")
    with pytest.raises(UsageError, match=r"unit='layer\.\*' matches no module"):
        fsdpckpt.convert(
            flat,
            tmp_path / "found",
            to="flattened",
            world_size=2,
            add_prefix="net.",
            unit="layer.*",
            use_orig_params=True,
        )


@pytest.mark.parametrize("buffer", ["table", "new.table", "*table"])
def test_buffers_may_be_named_as_in_the_source_or_as_they_will_be_written(buffer: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model = {"table": torch.randn(3, 4), "weight": torch.randn(5, 7), "bias": torch.randn(5)}
    torch.save({"model": model}, tmp_path / "full.pt")
    given = {"to": "flattened", "world_size": 2, "unit": "none", "use_orig_params": True, "only": "model"}
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "flat", add_prefix="new.", buffers=buffer, **given)  # type: ignore[arg-type]
    recorded = json.loads((tmp_path / "flat" / "fsdpckpt.json").read_text())["units"]
    assert [param["name"] for unit in recorded["units"] for param in unit["params"]] == ["new.weight", "new.bias"]
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "without", exclude="table", buffers="table", **given)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="buffers='rope' matches no name"):
        fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "out", buffers="rope", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("orig", [True, False])
@pytest.mark.parametrize("listed", ["by new names", "by --parameters", "by --units"])
def test_an_order_that_no_model_has_is_refused(full: Named, tmp_path: Path, listed: str, orig: bool) -> None:
    """``layers.1`` as a child of ``embed`` comes before ``layers.0`` in every model."""
    moved = {"layers.1": "embed.inner"}
    source = tmp_path / "full.pt"
    torch.save(full, source)
    order = [name.replace("layers.1", "embed.inner") for name in full["model"]]
    options: Named = {"rename": moved, "unit": ["none"], "use_orig_params": orig}
    if listed == "by new names":
        source = flattened(full, tmp_path / "flat", orig=True, world_size=RANKS, layers="none", key_type="name")
        options = {"rename": moved}
    elif listed == "by --parameters":
        (tmp_path / "names").write_text("\n".join(order))
        options |= {"parameters": tmp_path / "names"}
    else:
        flat = flattened(full, tmp_path / "flat", orig=True, world_size=RANKS, layers="none", key_type="name")
        recorded = (flat / "fsdpckpt.json").read_text().replace("layers.1", "embed.inner")
        (tmp_path / "units.json").write_text(json.dumps(json.loads(recorded)["units"]))
        options = {"rename": moved, "units": tmp_path / "units.json"}
    with pytest.raises(NeedsInformationError, match="no model lists them like") as caught:
        fsdpckpt.convert(source, tmp_path / "out", to="flattened", world_size=2, **options)
    assert "in that order" in str(caught.value.next_steps)


def test_an_order_that_no_model_has_is_refused_where_the_misplaced_parameter_is_shared(tmp_path: Path) -> None:
    """Both names of ``head`` are the root's own, which come before its children in every model."""
    model = {name: torch.randn(3) for name in ("scale", "layers.0.w", "layers.0.b", "head")}
    torch.save({"model": {**model, "tied": model["head"]}}, tmp_path / "full.pt")
    (tmp_path / "names").write_text("\n".join(model))
    options: Named = {"to": "flattened", "world_size": 2, "unit": ["none"], "use_orig_params": True, "buffers": "none"}
    with pytest.raises(NeedsInformationError, match="no model lists them like parameters"):
        fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "out", parameters=tmp_path / "names", **options)
    (tmp_path / "names").write_text("\n".join(["scale", "head", "layers.0.w", "layers.0.b"]))
    fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "out", parameters=tmp_path / "names", **options)
    fsdpckpt.convert(tmp_path / "out", tmp_path / "back.pt", to="full")
    found = torch.load(tmp_path / "back.pt", weights_only=True)["model"]
    require_identical(found, {**model, "tied": model["head"]})


def test_the_order_of_the_model_with_new_names_is_taken(full: Named, tmp_path: Path) -> None:
    """What the refusal advises: to full with the new names, then to flattened with the order."""
    flat = flattened(full, tmp_path / "flat", orig=True, world_size=RANKS, layers="none", key_type="name")
    fsdpckpt.convert(flat, tmp_path / "renamed.pt", to="full", container="torch", rename={"layers.1": "embed.inner"})
    order = ["embed.weight", "embed.inner.weight", "embed.inner.bias", "layers.0.weight", "layers.0.bias"]
    (tmp_path / "names").write_text("\n".join([*order, "norm.weight", "norm.bias"]))
    fsdpckpt.convert(
        tmp_path / "renamed.pt",
        tmp_path / "out",
        to="flattened",
        world_size=2,
        unit=["none"],
        use_orig_params=True,
        parameters=tmp_path / "names",
    )
    units = json.loads((tmp_path / "out" / "fsdpckpt.json").read_text())["units"]
    assert units["parameters"][:5] == order
