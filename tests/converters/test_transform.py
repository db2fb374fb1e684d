"""The passes between reading and writing, over a checkpoint in memory: what is refused, in which keys it comes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.layout import choose_layout
from fsdpckpt.converters.transform import begin, transform
from fsdpckpt.errors import (
    NeedsInformationError,
    SourceCorruptError,
    SourceMissingError,
    SourceUnsupportedError,
    UsageError,
)
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.flat.units.from_options import units_request
from fsdpckpt.ir.checkpoint import Checkpoint, Checksums, Layout, Problem, Section
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Strategy
from fsdpckpt.ir.units_json import encode, render
from fsdpckpt.ir.values import Value
from fsdpckpt.options import ConvertOptions, MissingState
from fsdpckpt.storage.sources import Sources
from tests.flat.flat_synthetic import checkpoint, named, replicas, sharded_model, whole
from tests.ir.checkpoints import with_ledger

PARAMS = (named("a.w", 5, 3), named("a.b", 5), named("b.w", 2, 5), named("b.b", 2))
NAMES = tuple(param.name for param in PARAMS)
UNITS = build_units(PARAMS, ("", "a", "b"), Settings(use_orig_params=True))


def full(keys: Sequence[ParamKey] = (0, 1, 2, 3), *, without: Sequence[ParamKey] = ()) -> Checkpoint:
    state: dict[ParamKey, dict[str, Tensor | Value]] = {
        key: {"step": 7, "exp_avg": whole(*param.shape, file=0, offset=4096 + 64 * number)}
        for number, (key, param) in enumerate(zip(keys, PARAMS, strict=True))
        if key not in without
    }
    optim = Optimizer.of(state, [{"lr": 0.1, "params": list(keys)}])
    return checkpoint(1, model=sharded_model(PARAMS), optim=optim, layout=Layout.FULL)


def transformed(held: Checkpoint, dst: str = "out.pt", **options: object) -> Draft:
    chosen = ConvertOptions(**options)  # type: ignore[arg-type]
    with Sources() as sources:
        layout = choose_layout(dst, chosen, held)
        return transform(begin(held, layout, sources), layout)


def keys(found: Draft) -> list[ParamKey]:
    assert found.checkpoint.optim is not None
    return list(found.checkpoint.optim.state)


@pytest.fixture
def units_file(tmp_path: Path) -> str:
    path = tmp_path / "units.json"
    path.write_text(render(encode(UNITS)))
    return str(path)


# What is refused.


def test_problems_count_in_the_sections_that_are_asked_for_also_where_nothing_of_them_is_left() -> None:
    problem = Problem("gap", "optim 0.exp_avg lacks elements", section=Section.OPTIM)
    held = with_ledger(full(), problems=(problem,))
    with pytest.raises(SourceCorruptError):
        transformed(held)
    assert transformed(held, only=Section.MODEL).checkpoint.optim is None
    anywhere = with_ledger(held, problems=(replace(problem, section=None),))
    with pytest.raises(SourceCorruptError):
        transformed(anywhere, only=Section.MODEL)
    extra = with_ledger(held, problems=(replace(problem, section=Section.EXTRA),))
    for there in (extra, replace(extra, extra={"epoch": 3}), replace(extra, rank_extra=({"epoch": 3},))):
        with pytest.raises(SourceCorruptError):
            transformed(there)
        transformed(there, only=Section.MODEL)
    with pytest.raises(SourceCorruptError):
        transformed(replace(held, optim=None))
    transformed(with_ledger(held, problems=(replace(problem, fatal=False),)))


def test_copies_of_a_state_that_differ_are_refused() -> None:
    step = replicas(3)
    optim = Optimizer.of({"a.w": {"step": step}}, [{"params": ["a.w"]}])
    files = tuple(Stored(f"rank{rank}", 4096) for rank in range(3))
    held = replace(checkpoint(3, optim=optim, layout=Layout.SHARDED), files=files)
    transformed(replace(held, checksums=Checksums.of([(rank, 64, 4, 7) for rank in range(3)])), to=Layout.FULL)
    with pytest.raises(SourceCorruptError):
        transformed(replace(held, checksums=Checksums.of([(rank, 64, 4, rank) for rank in range(3)])), to=Layout.FULL)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("unit", ("a",)), ("use_orig_params", False), ("use_orig_params", True), ("strategy", Strategy.NO_SHARD),
        ("param_dtype", "bfloat16"), ("shard_size", 2),
    ],
)  # fmt: skip
def test_an_option_about_units_that_nothing_needs_is_a_mistake(option: str, value: object) -> None:
    flag = ("--no-" if value is False else "--") + option.replace("_", "-")
    with pytest.raises(UsageError) as caught:
        transformed(full(), **{option: value})
    assert caught.value.what.startswith(f"{flag} has no effect")
    with pytest.raises(UsageError):  # ids by name do not make use of it either
        transformed(full(), key_type="name", **{option: value})


def test_a_units_file_serves_keys_and_names_and_is_noted_where_there_are_none(units_file: str) -> None:
    with pytest.raises(UsageError) as caught:
        transformed(full(), units=units_file, shard_size=2)
    assert caught.value.what.startswith("--shard-size has no effect")
    notes = transformed(full(), units=units_file).checkpoint.notes
    assert [note.message.partition(":")[0] for note in notes if note.kind == "unused"] == ["--units had no effect"]
    assert keys(transformed(full(), units=units_file, key_type="name")) == list(NAMES)
    assert keys(transformed(full(), units=units_file, include=("a.*",))) == [0, 1]
    assert keys(transformed(full(), units=units_file, exclude=("a.*",))) == [0, 1]
    assert keys(transformed(full(without=[2]), units=units_file, missing_state=MissingState.SKIP)) == [0, 1, 3]


def test_there_has_to_be_something_to_flatten() -> None:
    with pytest.raises(UsageError) as caught:
        transformed(
            replace(full(), model=None, optim=None, extra={"epoch": 3}), "out", to=Layout.FLATTENED, world_size=2
        )
    assert "neither a model nor an optimizer" in caught.value.what


# Keys.


def test_keys_come_out_as_they_came_in_unless_asked_otherwise() -> None:
    for held, own in ((full(), [0, 1, 2, 3]), (full(NAMES), list(NAMES))):
        assert keys(transformed(held)) == own
        assert keys(transformed(held, key_type="name")) == list(NAMES)
        assert keys(transformed(held, key_type="id")) == [0, 1, 2, 3]


def test_names_are_chosen_by_what_they_are_in_the_source_and_ids_count_what_is_left() -> None:
    found = transformed(full(), include=("b.*",), rename=(("b", "c"),))
    assert keys(found) == [0, 1]
    assert found.checkpoint.model is not None and list(found.checkpoint.model.params) == ["c.w", "c.b"]
    assert keys(transformed(full(NAMES), exclude=("a.*",), add_prefix="m.")) == ["m.b.w", "m.b.b"]


def test_parameters_without_state_are_made_or_noted_and_keep_their_keys() -> None:
    held = full(without=[2])
    noted = transformed(held)
    assert keys(noted) == [0, 1, 3]
    assert [note.keys for note in noted.checkpoint.notes if note.kind == "missing-state"] == [("2",)]
    made = transformed(held, missing_state=MissingState.ZEROS)
    assert keys(made) == [0, 1, 2, 3]


def test_a_cast_gives_every_name_a_tensor_of_its_own() -> None:
    """Names that share bytes would be cast as one, which their container may not be able to say."""
    held = full()
    assert held.model is not None
    tied = {**held.model.params, "head": held.model.params["a.w"]}
    held.model.params.clear()
    held.model.params.update(tied)
    kept = transformed(held).checkpoint.model
    assert kept is not None and kept.params["head"] is kept.params["a.w"]
    for option in ("dtype", "optim_dtype"):
        cast = transformed(held, **{option: "bfloat16"}).checkpoint.model
        assert cast is not None and cast.params["head"] is not cast.params["a.w"]


# Flattened targets.


def flattened(held: Checkpoint, **options: object) -> Draft:
    return transformed(held, "out", to=Layout.FLATTENED, world_size=2, **options)


def test_the_writer_gets_names_and_the_keys_that_are_wanted(units_file: str) -> None:
    for held, own in ((full(), "id"), (full(NAMES), "name")):
        found = flattened(held, units=units_file)
        assert keys(found) == list(NAMES) and found.key_type == own and found.units is not None
        assert flattened(held, units=units_file, key_type="name").key_type == "name"
        assert flattened(held, units=units_file, key_type="id").key_type == "id"
        assert flattened(held, units=units_file, use_orig_params=False).key_type == "id"
    assert flattened(replace(full(), optim=None), units=units_file).key_type == "id"
    with pytest.raises(UsageError) as caught:
        flattened(full(NAMES), units=units_file, use_orig_params=False, key_type="name")
    assert "--use-orig-params" in (caught.value.next_step or "")


def test_a_flat_parameter_has_all_states_of_its_parameters_or_none_and_one_step(units_file: str) -> None:
    partly = full(NAMES, without=["a.b"])
    assert keys(flattened(partly, units=units_file)) == ["a.w", "b.w", "b.b"]
    with pytest.raises(NeedsInformationError):
        flattened(partly, units=units_file, use_orig_params=False)
    made = flattened(partly, units=units_file, use_orig_params=False, missing_state=MissingState.ZEROS)
    assert sorted(map(str, keys(made))) == sorted(NAMES)
    other = full(NAMES)
    assert other.optim is not None
    other.optim.state["a.b"]["step"] = 8
    flattened(other, units=units_file)
    with pytest.raises(SourceUnsupportedError):
        flattened(other, units=units_file, use_orig_params=False)


def test_either_section_alone_can_be_flattened(units_file: str) -> None:
    assert keys(flattened(replace(full(NAMES), model=None), units=units_file)) == list(NAMES)
    assert flattened(replace(full(NAMES), optim=None), units=units_file, use_orig_params=False).key_type == "id"


def test_what_is_left_out_is_in_no_unit() -> None:
    found = flattened(full(NAMES), include=("a.*",), unit=("a",), use_orig_params=True)
    assert keys(found) == ["a.w", "a.b"]
    assert found.units is not None and found.units.parameters == ("a.w", "a.b")


def test_units_say_the_dtype_that_is_written(units_file: str) -> None:
    with pytest.raises(SourceCorruptError) as caught:
        flattened(full(NAMES), units=units_file, dtype="bfloat16")
    assert "a.w: float32 in the units, bfloat16 in the model section" in caught.value.details


def test_sharding_groups_divide_the_ranks_of_the_target(units_file: str) -> None:
    sharing = {"units": units_file, "strategy": Strategy.HYBRID_SHARD}
    found = flattened(full(NAMES), **sharing, shard_size=2)
    assert found.units is not None and found.units.shard_size in (None, 2)
    with pytest.raises(UsageError):
        flattened(full(NAMES), **sharing, shard_size=3)


def test_a_reference_names_the_ids_of_an_optimizer_alone(tmp_path: Path) -> None:
    torch.save({param.name: torch.rand(param.shape) for param in PARAMS}, tmp_path / "model.pt")
    held = replace(full(), model=None)
    assert keys(transformed(held, key_type="name", reference=str(tmp_path / "model.pt"))) == list(NAMES)
    with pytest.raises(NeedsInformationError):
        transformed(held, key_type="name")


def test_how_units_were_found_is_noted(units_file: str) -> None:
    messages = [note.message for note in flattened(full(), units=units_file).checkpoint.notes if note.kind == "units"]
    assert any(units_file in line for line in messages)


def test_an_unordered_model_needs_the_order_from_elsewhere(units_file: str) -> None:
    held = full(NAMES).without_order()
    assert keys(flattened(held, units=units_file)) == list(NAMES)
    with pytest.raises(NeedsInformationError):
        flattened(held, unit=("a", "b"), use_orig_params=True)


# What the options say.


def test_a_dtype_of_the_mixed_precision_has_to_be_a_floating_one() -> None:
    assert units_request(ConvertOptions(param_dtype="bfloat16")).param_dtype is DTYPES["bfloat16"]
    assert units_request(ConvertOptions()).param_dtype is None
    for name in ("int32", "half-ish"):
        with pytest.raises(UsageError) as caught:
            units_request(ConvertOptions(param_dtype=name))
        offered = (caught.value.expected or "").split(", ")
        assert "bfloat16" in offered and "float32" in offered and not {"int32", "bool", name} & set(offered)


def test_a_list_of_parameters_is_one_name_a_line(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("\n  b.w \n\na.w\n\n")
    assert units_request(ConvertOptions(parameters=str(path))).parameters == ("b.w", "a.w")
    assert units_request(ConvertOptions()).parameters is None


@pytest.mark.parametrize(
    ("content", "details", "message"),
    [(b"a\nb\na\nb\nc", ("a", "b"), "more than once"), (b" \n\n", (), "names no parameter")],
)
def test_a_list_with_names_twice_or_without_any_is_refused(
    tmp_path: Path, content: bytes, details: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "names.txt"
    path.write_bytes(content)
    with pytest.raises(SourceCorruptError if details else UsageError) as caught:
        units_request(ConvertOptions(parameters=str(path)))
    assert caught.value.details == details and message in caught.value.what


def test_a_list_that_cannot_be_read_is_missing(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path, reason in (
        (tmp_path / "binary", "not a text file"),
        (tmp_path / "none", "No such file"),
        ("a\0b", "not a text"),
    ):
        with pytest.raises(SourceMissingError) as caught:
            units_request(ConvertOptions(parameters=str(path)))
        assert reason in caught.value.what
