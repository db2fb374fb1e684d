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
from tests.converters.jobs import Job, converted, listed, recorded, refused, save
from tests.oracle.compare import require_identical

Named = dict[str, Any]
RANKS = 3
ON_THREE: Named = {"to": "flattened", "world_size": RANKS}
NET: Named = {"add_prefix": "net."}


@pytest.fixture(params=[True, False], ids=["orig", "flat"])
def orig(request: pytest.FixtureRequest) -> bool:
    return request.param


def content(*, orig: bool = True) -> Named:
    """A model, and its optimizer by name in two groups that do not follow the model's order.

    With ``use_orig_params=False`` a flat parameter is in one group.
    """
    torch.manual_seed(3)
    layers = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 3)])
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "layers": layers, "norm": nn.LayerNorm(3)})
    vectors = [name for name, param in model.named_parameters() if param.ndim == 1]
    matrices = [name for name, param in model.named_parameters() if param.ndim > 1]
    groups = [vectors[::-1], matrices] if orig else [[*vectors[::-1], *matrices]]
    job = Job(model, groups, lr=1e-2)
    job.optimizer.param_groups[0]["weight_decay"] = 0.0
    return job.saved("name")


def flattened(held: Named, name: str, *, orig: bool = True, ranks: int = RANKS, layers: Any, **options: Any) -> str:
    more = {"key_type": "id"} if options.get("only") != "model" else {}
    flat: Named = {"to": "flattened", "world_size": ranks, "unit": layers, "use_orig_params": orig}
    fsdpckpt.convert(save(held, f"{name}.pt"), name, **{**flat, **more, **options})
    return name


def two_flat(*, orig: bool = True, **options: Any) -> str:
    return flattened(content(orig=orig), "flat", orig=orig, ranks=2, layers="layers.*", **options)


def mapped(held: Named, new_name: Callable[[str], str | None]) -> Named:
    """``held`` under new names, without those of which there is none."""

    def renamed(named: Named) -> Named:
        return {new: value for name, value in named.items() if (new := new_name(name)) is not None}

    optimizer = held["optimizer"]
    groups = [{**group, "params": [*renamed(dict.fromkeys(group["params"]))]} for group in optimizer["param_groups"]]
    return {
        "model": renamed(held["model"]),
        "optimizer": {"state": renamed(optimizer["state"]), "param_groups": groups},
    }


def in_net(name: str) -> str:
    return f"net.{name}"


def require_same(found: str, expected: str, section: str = "") -> None:
    """Both directories hold the same files: the model's byte for byte, the optimizer's by value."""
    names = sorted(path.name for path in Path(expected).glob(f"{section}*.pt"))
    assert names and sorted(path.name for path in Path(found).glob("*.pt")) == names
    for name in names:
        if name.startswith("model"):
            assert Path(found, name).read_bytes() == Path(expected, name).read_bytes(), name
        else:
            require_identical(*(torch.load(Path(path, name)) for path in (found, expected)), name)


NAMES: dict[str, tuple[Named, Callable[[str], str | None], Any]] = {
    "a prefix more": (NET, in_net, "net.layers.*"),
    "a prefix less": ({"strip_prefix": "layers."}, lambda name: name.removeprefix("layers."), "[01]"),
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
        ["layers.0", "last"],
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_change_as_they_do_through_a_full_checkpoint(case: str, orig: bool) -> None:
    options, new_name, layers = NAMES[case]
    expected = flattened(mapped(content(orig=orig), new_name), "expected", orig=orig, layers=layers)
    fsdpckpt.convert(two_flat(orig=orig), "found", **ON_THREE, **options)
    require_same("found", expected)
    assert recorded("found")["units"] == recorded(expected)["units"]


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
def test_every_other_option_does_what_it_does_to_a_full_checkpoint(options: Named) -> None:
    held = content()
    if "missing_state" in options:
        del held["optimizer"]["state"]["norm.bias"]
    flat = flattened(held, "flat", ranks=2, layers="layers.*")
    fsdpckpt.convert(flat, "found", **ON_THREE, **options)
    require_same("found", flattened(held, "expected", layers="layers.*", **options))


def test_one_section_alone_gets_the_new_names_too_and_is_cut_by_the_model_that_is_left_out(orig: bool) -> None:
    held = content(orig=orig)
    expected = flattened(mapped(held, in_net), "expected", orig=orig, layers="net.layers.*")
    flat = two_flat(orig=orig)
    for section in ("model", "optim"):
        fsdpckpt.convert(flat, section, **ON_THREE, only=section, **NET)
        require_same(section, expected, section)
    require_same(flattened(held, "alone", orig=orig, layers="net.layers.*", only="optim", **NET), expected, "optim")


def test_param_names_and_the_place_of_buffers_are_those_of_the_new_names_too(orig: bool) -> None:
    layers = nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3)])
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "layers": layers})
    job = Job(model, words="")
    buffers: Named = {"buffers": ["*running*"], "orig": orig}
    flat = flattened(job.saved(), "flat", ranks=2, layers="layers.*", **buffers)
    fsdpckpt.convert(flat, "found", **ON_THREE, rename={"layers": "blocks"}, **NET)
    renamed = nn.ModuleDict({"net": nn.ModuleDict({"embed": model["embed"], "blocks": layers})})
    again = {"model": renamed.state_dict(), "optimizer": job.ids}
    again["optimizer"]["param_groups"][0]["param_names"] = [name for name, _ in renamed.named_parameters()]
    expected = flattened(again, "expected", layers="net.blocks.*", **buffers)
    for rank in range(RANKS):
        name = f"optim_world_size_{RANKS}_rank_{rank}.pt"
        require_identical(*(torch.load(Path(path, name)) for path in ("found", expected)), name)
    assert fsdpckpt.diff("found", expected).same


def test_what_is_given_of_the_units_may_have_the_sources_names_or_the_targets() -> None:
    held, flat = content(), two_flat()
    new = flattened(mapped(held, in_net), "new", layers="net.layers.*")
    for source in (flat, new):
        Path("units.json").write_text(json.dumps(recorded(source)["units"]))
        fsdpckpt.convert(flat, f"from {source}", **ON_THREE, **NET, units="units.json")
        require_same(f"from {source}", new)
    options = {"reference": "flat.pt", "parameters": listed([held["model"]])}
    fsdpckpt.convert(flat, "listed", **ON_THREE, **NET, **options)
    require_same("listed", new)
    words = r"unit='layer\.\*' matches no module"
    refused(UsageError, words, flat, "no", **ON_THREE, **NET, unit="layer.*", use_orig_params=True)


@pytest.mark.parametrize("buffer", ["table", "new.table", "*table"])
def test_buffers_may_be_named_as_in_the_source_or_as_they_will_be_written(buffer: str) -> None:
    save({"model": {"table": torch.randn(3, 4), "weight": torch.randn(5, 7), "bias": torch.randn(5)}})
    given: Named = {"to": "flattened", "world_size": 2, "unit": "none", "use_orig_params": True, "only": "model"}
    fsdpckpt.convert("source.pt", "flat", add_prefix="new.", buffers=buffer, **given)
    params = [param["name"] for unit in recorded("flat")["units"]["units"] for param in unit["params"]]
    assert params == ["new.weight", "new.bias"]
    fsdpckpt.convert("source.pt", "without", exclude="table", buffers="table", **given)
    refused(UsageError, "buffers='rope' matches no name", "source.pt", "out", buffers="rope", **given)


MOVED = {"layers.1": "embed.inner"}


@pytest.mark.parametrize("by", ["new names", "--parameters", "--units"])
def test_an_order_that_no_model_has_is_refused(by: str, orig: bool) -> None:
    """``layers.1`` as a child of ``embed`` comes before ``layers.0`` in every model."""
    held = content()
    source, options = save(held, "full.pt"), {"rename": MOVED}
    if by == "--parameters":
        names = [name.replace("layers.1", "embed.inner") for name in held["model"]]
        options |= {"parameters": listed([names]), "unit": ["none"], "use_orig_params": orig}
    else:
        flat = flattened(held, "flat", layers="none", key_type="name")
        if by == "new names":
            source = flat
        else:
            units = json.dumps(recorded(flat)["units"]).replace("layers.1", "embed.inner")
            Path("units.json").write_text(units)
            options |= {"units": "units.json"}
    words = "no model lists them like"
    error = refused(NeedsInformationError, words, source, "out", to="flattened", world_size=2, **options)
    assert "in that order" in str(error.next_steps)


def test_an_order_that_no_model_has_is_refused_where_the_misplaced_parameter_is_shared() -> None:
    """Both names of ``head`` are the root's own, which come before its children in every model."""
    names = ["scale", "layers.0.w", "layers.0.b", "head"]
    model = {name: torch.randn(3) for name in names}
    model["tied"] = model["head"]
    save({"model": model})
    options: Named = {"to": "flattened", "world_size": 2, "unit": ["none"], "use_orig_params": True, "buffers": "none"}
    words = "no model lists them like parameters"
    refused(NeedsInformationError, words, "source.pt", "out", parameters=listed([names]), **options)
    fsdpckpt.convert("source.pt", "out", parameters=listed([[names[0], names[3], *names[1:3]]]), **options)
    require_identical(converted("out", "back.pt", to="full")["model"], model)


def test_the_order_of_the_model_with_new_names_is_taken() -> None:
    """What the refusal advises: to full with the new names, then to flattened with the order."""
    flat = flattened(content(), "flat", layers="none", key_type="name")
    fsdpckpt.convert(flat, "renamed.pt", to="full", container="torch", rename=MOVED)
    order = ["embed.weight", "embed.inner.weight", "embed.inner.bias", "layers.0.weight", "layers.0.bias"]
    options: Named = {
        "unit": ["none"],
        "use_orig_params": True,
        "parameters": listed([[*order, "norm.weight", "norm.bias"]]),
    }
    fsdpckpt.convert("renamed.pt", "out", to="flattened", world_size=2, **options)
    assert recorded("out")["units"]["parameters"][:5] == order
