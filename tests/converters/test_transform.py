"""The steps between reading and writing: which options are refused, and which keys and units come out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.layout import choose_layout
from fsdpckpt.converters.transform import begin, transform
from fsdpckpt.errors import SourceCorruptError, UsageError
from fsdpckpt.flat.units.from_options import listed_parameters, units_request
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, Problem, Section
from fsdpckpt.options import ConvertOptions
from fsdpckpt.storage.sources import Sources
from tests.flat.flat_synthetic import checkpoint, named, sharded_model
from tests.ir.checkpoints import with_ledger
from tests.oracle.compare import identical
from tests.refusals import Refused

SHAPES = {"a.w": (5, 3), "a.b": (5,), "b.w": (2, 5), "b.b": (2,)}
NAMES = list(SHAPES)
FLAT: dict[str, Any] = {"to": "flattened", "world_size": 2, "verify": "full"}


def content(key_type: str = "id") -> dict[str, Any]:
    keys: list[Any] = [*range(4)] if key_type == "id" else NAMES
    states = {
        key: {"step": torch.tensor(7.0), "exp_avg": torch.rand(shape)}
        for key, shape in zip(keys, SHAPES.values(), strict=True)
    }
    model = {name: torch.rand(shape) for name, shape in SHAPES.items()}
    return {"model": model, "optimizer": {"state": states, "param_groups": [{"lr": 0.1, "params": keys}]}}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save(content(), tmp_path / "full.pt")
    return tmp_path / "full.pt"


@pytest.fixture
def units_file(source: Path, tmp_path: Path) -> Path:
    fsdpckpt.convert(source, tmp_path / "job", unit=["a", "b"], use_orig_params=True, buffers=["none"], **FLAT)
    units = json.loads((tmp_path / "job" / "fsdpckpt.json").read_text())["units"]
    (tmp_path / "units.json").write_text(json.dumps({**units, "world_size": None}))
    return tmp_path / "units.json"


def steps(held: Checkpoint, target: str = "out.pt", **options: Any) -> Draft:
    with Sources() as sources:
        asked = ConvertOptions(**options)
        layout, request = choose_layout(target, asked, held), units_request(asked, listed_parameters(asked))
        return transform(begin(held, layout, sources, request=request), layout)


def test_problems_count_in_the_sections_that_are_asked_for_also_where_nothing_of_them_is_left() -> None:
    """Without a section they are of all; those of extras count where the extras are taken."""
    full = checkpoint(1, model=sharded_model([named("w", 5, 3)]), layout=Layout.FULL)
    problem = Problem("gap", "optim 0.exp_avg lacks elements", section=Section.OPTIM)
    extra = with_ledger(full, problems=(replace(problem, section=Section.EXTRA),))
    anywhere = with_ledger(full, problems=(replace(problem, section=None),))
    of_optim = with_ledger(full, problems=(problem,))
    for held, refused in ((of_optim, False), (anywhere, True), (replace(extra, extra={"epoch": 3}), False)):
        with pytest.raises(SourceCorruptError):
            steps(held)
        if refused:
            with pytest.raises(SourceCorruptError):
                steps(held, only=Section.MODEL)
        else:
            assert steps(held, only=Section.MODEL).checkpoint.optim is None
    with pytest.raises(SourceCorruptError):
        steps(replace(extra, rank_extra=({"epoch": 3},)))
    steps(with_ledger(full, problems=(replace(problem, fatal=False),)))


def test_there_has_to_be_something_to_flatten() -> None:
    held = replace(checkpoint(1, layout=Layout.FULL), extra={"epoch": 3})
    with pytest.raises(UsageError, match="neither a model nor an optimizer"):
        steps(held, "out", to=Layout.FLATTENED, world_size=2)


@pytest.mark.parametrize("more", [{}, {"key_type": "name"}], ids=str)
@pytest.mark.parametrize(
    "option",
    [{"unit": ["a"]}, {"use_orig_params": False}, {"use_orig_params": True}, {"strategy": "no-shard"},
     {"param_dtype": "bfloat16"}, {"shard_size": 2}],
    ids=str,
)  # fmt: skip
def test_an_option_about_units_that_nothing_needs_is_a_mistake(
    option: dict[str, Any], more: dict[str, Any], source: Path, tmp_path: Path
) -> None:
    """Names for ids do not make use of it either."""
    ((name, value),) = option.items()
    flag = ("--no-" if value is False else "--") + name.replace("_", "-")
    refused = Refused(2, [flag, "has no effect"])
    refused.by(lambda: fsdpckpt.convert(source, tmp_path / "out.pt", **option, **more))


def test_a_units_file_serves_keys_and_is_noted_where_there_is_no_need_of_it(
    source: Path, units_file: Path, tmp_path: Path
) -> None:
    unused = Refused(2, ["--shard-size", "has no effect"])
    unused.by(lambda: fsdpckpt.convert(source, tmp_path / "no.pt", units=units_file, shard_size=2))
    for options, used in (({}, False), ({"key_type": "name"}, True), ({"include": ["a.*"]}, True)):
        target = tmp_path / f"{len(options)}{used}.pt"
        report = fsdpckpt.convert(source, target, units=units_file, overwrite=True, **options)  # type: ignore[arg-type]
        assert any("--units had no effect" in str(note.message) for note in report.notes) is not used
    assert list(torch.load(target)["optimizer"]["state"]) == [0, 1]


@pytest.mark.parametrize("target", [{"dst": "out.pt"}, {"dst": "out", "to": "sharded", "world_size": 2}], ids=str)
def test_a_weight_with_two_names_is_cast_under_both(target: dict[str, Any], tmp_path: Path) -> None:
    """Names that share bytes would be cast as one, which their container may not be able to say."""
    saved = content()
    saved["model"]["head"] = saved["model"]["a.w"]
    torch.save(saved, tmp_path / "full.pt")
    options = dict(target)
    dst = tmp_path / options.pop("dst")
    fsdpckpt.convert(tmp_path / "full.pt", dst, dtype="bfloat16", verify="full", **options)
    with fsdpckpt.open(dst) as found:
        for name in ("head", "a.w"):
            assert identical(found[name].torch(), saved["model"]["a.w"].bfloat16())


@pytest.mark.parametrize(
    ("own", "options", "keys"),
    [
        ("id", {}, [0, 1, 2, 3]), ("name", {}, NAMES), ("id", {"key_type": "name"}, NAMES),
        ("name", {"key_type": "id"}, [0, 1, 2, 3]), ("name", {"use_orig_params": False}, [0, 1]),
        ("name", {"only": "optim"}, NAMES), ("name", {"include": ["a.*"], "units": None, "unit": ["a"]}, NAMES[:2]),
    ],
)  # fmt: skip
def test_flat_shards_have_the_keys_that_are_wanted_and_the_units_of_what_is_taken(
    own: str, options: dict[str, Any], keys: list[Any], units_file: Path, tmp_path: Path
) -> None:
    torch.save(content(own), tmp_path / "full.pt")
    given = {"use_orig_params": True, "units": units_file, **FLAT, **options}
    report = fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "flat", **given)
    optim = torch.load(tmp_path / "flat" / "optim_world_size_2_rank_0.pt", weights_only=True)
    listed = [key for group in optim["param_groups"] for key in group["params"]]
    assert [key.replace("_fsdp_wrapped_module.", "") if isinstance(key, str) else key for key in listed] in (
        keys, [0, 1, 2]  # the root has a flat parameter of its own
    )  # fmt: skip
    written = json.loads((tmp_path / "flat" / "fsdpckpt.json").read_text())["units"]
    assert written["parameters"] == (NAMES[:2] if "include" in options else NAMES)
    if given["units"] is not None:
        assert any(str(units_file) in note.message for note in report.notes if note.kind == "units")


def test_names_are_no_keys_of_flat_parameters(units_file: Path, tmp_path: Path) -> None:
    torch.save(content("name"), tmp_path / "full.pt")
    options = {**FLAT, "units": units_file, "use_orig_params": False, "key_type": "name"}
    Refused(2, "--use-orig-params").by(lambda: fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "flat", **options))


def test_units_say_the_dtype_that_is_written(source: Path, units_file: Path, tmp_path: Path) -> None:
    options = {**FLAT, "units": units_file, "dtype": "bfloat16"}
    words = "a.w: float32 in the units, bfloat16 in the model section"
    Refused(3, words).by(lambda: fsdpckpt.convert(source, tmp_path / "flat", **options))


@pytest.mark.parametrize("name", ["int32", "half-ish"])
def test_a_dtype_of_the_mixed_precision_has_to_be_a_floating_one(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        ConvertOptions(param_dtype=name)
    offered = (caught.value.expected or "").split(", ")
    assert {"bfloat16", "float32"} <= set(offered)
    assert not {"int32", "bool", name} & set(offered)
