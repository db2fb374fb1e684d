"""Whether a source is in slices of flat parameters: seen in it, or, of one rank, said by units and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, SourceUnsupportedError
from fsdpckpt.flat.logical import logical
from fsdpckpt.flat.unflatten import name_slices
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.flat.units.presence import is_flattened
from fsdpckpt.flat.units.request import ResolvedUnits, UnitsRequest
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, ModelState, Note, Problem
from fsdpckpt.ir.invariants import problems
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Strategy, Units
from fsdpckpt.ir.units_json import encode, render
from fsdpckpt.ir.values import Value
from fsdpckpt.storage.sources import Sources
from tests.flat.flat_checkpoints import Played, unit, units_of
from tests.flat.flat_synthetic import checkpoint, local_model, named, optimizer, sharded_model, slices, whole
from tests.flat.test_proofs import SHAPES, adagrad, proved, with_checksums, written
from tests.ir.checkpoints import with_ledger, with_origin
from tests.ir.optimizers import without_entry

PARAMS = (named("a.weight", 5, 3), named("a.bias", 5), named("b.weight", 2, 5))
UNITS = build_units(PARAMS, ("", "a"), Settings(use_orig_params=False))


def said(source: Checkpoint, request: UnitsRequest | None = None) -> bool:
    with Sources() as sources:
        return is_flattened(source, sources, request)


def optim(*leaves: Tensor | Value, by: Sequence[ParamKey] = (0, 1, 2)) -> Optimizer:
    state: dict[ParamKey, dict[str, Tensor | Value]] = {
        key: {"step": whole(), "mode": "fast", "exp_avg": leaf} for key, leaf in zip(by, leaves, strict=False)
    }
    return Optimizer.of(state, [{"lr": 0.1, "params": list(by)}])


def one_rank(units: Units = UNITS, *, layout: Layout = Layout.FULL, model: ModelState | None = None) -> Checkpoint:
    """What one rank's raw optimizer looks like: whole vectors."""
    raw = optimizer(units, 1)
    state = {
        key: {name: replace(leaf, sharded=None) if isinstance(leaf, Tensor) else leaf for name, leaf in states.items()}
        for key, states in raw.state.items()
    }
    return checkpoint(1, model=model, optim=Optimizer.of(dict(state), raw.param_groups), layout=layout)


def test_flat_parameters_and_slices_are_seen() -> None:
    assert said(checkpoint(2, model=local_model(UNITS, 2)))
    assert said(checkpoint(2, optim=optim(slices([4, 3]))))
    assert said(checkpoint(2, optim=optim(slices([4, 3]), by=["w"])))
    assert said(checkpoint(2, model=sharded_model(PARAMS), optim=optim(whole(5), slices([4, 3]))))


def test_whole_tensors_are_none() -> None:
    assert not said(checkpoint(2, model=sharded_model(PARAMS)))
    assert not said(checkpoint(2, model=sharded_model(PARAMS), optim=optim(whole(5, 3), whole(5), whole(2, 5))))
    assert not said(checkpoint(2))


def test_the_vectors_of_one_rank_are_slices_where_units_beside_them_fit() -> None:
    source = one_rank()
    assert not said(source)
    assert said(replace(source, units=UNITS))
    longer = build_units((*PARAMS, named("b.bias", 7)), ("", "a"), Settings(use_orig_params=False))
    assert not said(replace(source, units=longer))


def test_a_directory_that_says_it_is_flattened_is_believed_and_its_units_are_proved_later() -> None:
    longer = build_units((*PARAMS, named("b.bias", 7)), ("", "a"), Settings(use_orig_params=False))
    assert said(replace(one_rank(layout=Layout.FLATTENED), units=longer))


def test_whole_matrices_are_no_slices_whatever_units_lie_beside_them() -> None:
    source = checkpoint(1, optim=optim(whole(5, 3), whole(5)), layout=Layout.FULL, units=UNITS)
    assert not said(source)


def test_units_that_are_given_count_where_none_lie_beside(tmp_path: Path) -> None:
    path = tmp_path / "units.json"
    path.write_text(render(encode(UNITS)))
    longer = build_units((*PARAMS, named("b.bias", 7)), ("", "a"), Settings(use_orig_params=False))
    request = UnitsRequest(file=str(path))
    assert said(one_rank(), request)
    assert not said(replace(one_rank(), units=longer), request)
    assert not said(one_rank(longer), request)


@pytest.mark.parametrize("model", [None, sharded_model(PARAMS)])
def test_unit_paths_make_slices_of_the_vectors_of_one_rank(model: ModelState | None) -> None:
    request = UnitsRequest(globs=("a",))
    source = one_rank(model=model)
    assert said(source, request)
    assert not said(source, UnitsRequest())
    assert not said(with_origin(source, world_size=2), request)
    assert not said(replace(source, optim=optim(whole(5), whole(5, 3))), request)
    assert not said(replace(source, optim=optim(by=())), request)


def test_a_model_of_vectors_only_has_states_that_are_vectors() -> None:
    params = (named("a", 5), named("b", 7))
    model = sharded_model(params)
    source = checkpoint(1, model=model, optim=optim(whole(5), whole(7)), layout=Layout.FULL)
    request = UnitsRequest(globs=("none",))
    assert not said(source, request)
    assert said(replace(source, model=ModelState({})), request)
    assert not said(replace(source, model=ModelState({**model.params, "note": "text"})), request)
    assert said(replace(source, model=ModelState({**model.params, "w": whole(2, 3)})), request)


def test_names_are_no_ids_of_flat_parameters() -> None:
    source = checkpoint(1, optim=optim(whole(5), by=["w"]), layout=Layout.FULL)
    assert not said(source, UnitsRequest(globs=("none",)))
    assert not said(with_origin(replace(source, units=UNITS), layout=Layout.FLATTENED))


def test_units_of_names_alone_change_nothing() -> None:
    source = one_rank()
    with Sources() as sources:
        assert name_slices(source, ResolvedUnits(UNITS, None, ("inferred",)), sources) is source


@pytest.mark.parametrize("change", [None, 3])
def test_slices_get_their_names_once_padding_and_replicas_are_proved(tmp_path: Path, change: int | None) -> None:
    units = units_of(replace(unit("", SHAPES), strategy=Strategy.HYBRID_SHARD), use_orig_params=False, shard_size=2)
    played = Played(units, 4)
    source = written(played, tmp_path, optim=adagrad(units, played))
    assert source.optim is not None
    slices_ = source.optim.state[0]["sum"]
    assert isinstance(slices_, Tensor)
    source = with_checksums(source, slices_, change)
    found = ResolvedUnits(units, proved(source, units), ("how they were found",))
    with Sources() as sources:
        if change is not None:
            with pytest.raises(SourceCorruptError):
                name_slices(source, found, sources)
        named_ = name_slices(source, found, sources, replicas=change is None)
    assert named_.optim is not None and list(named_.optim.state) == list(SHAPES)
    messages = [note.message for note in named_.notes]
    assert "how they were found" in messages
    assert any(line.startswith("2 replicas of slices compared") for line in messages) is (change is None)


@pytest.mark.parametrize(("shapes", "noted"), [(SHAPES, True), ({"w": (2, 8)}, False)])
def test_padding_that_was_checked_is_noted(tmp_path: Path, shapes: dict[str, tuple[int, ...]], noted: bool) -> None:
    units = units_of(unit("", shapes), use_orig_params=False)
    played = Played(units, 4)
    source = written(played, tmp_path, optim=adagrad(units, played))
    with Sources() as sources:
        found = name_slices(source, ResolvedUnits(units, proved(source, units), ()), sources)
    lines = [note.message for note in found.notes if "of padding" in note.message]
    assert lines == (["1 elements of padding hold what FSDP1 writes there"] if noted else [])


# ``logical``: what inspect, verify, diff and open show of a flattened checkpoint.


def adam(tmp_path: Path, units: Units) -> Checkpoint:
    played = Played(units, 4)
    return written(played, tmp_path, optim=adagrad(units, played))


def hybrid() -> Units:
    return units_of(replace(unit("", SHAPES), strategy=Strategy.HYBRID_SHARD), use_orig_params=False, shard_size=2)


def units_file(tmp_path: Path, units: Units) -> str:
    path = tmp_path / "given.json"
    path.write_text(render(encode(units)))
    return str(path)


def shown(source: Checkpoint, units: str | None = None, *, listing: bool = False) -> Checkpoint:
    with Sources() as sources:
        return logical(source, sources, UnitsRequest(file=units), listing=listing)


def keys(source: Checkpoint) -> list[ParamKey]:
    assert source.optim is not None
    return list(source.optim.state)


def test_a_checkpoint_without_slices_is_shown_as_it_is() -> None:
    source = checkpoint(2, model=sharded_model(PARAMS), units=UNITS)
    assert shown(source) is source


@pytest.mark.parametrize("listing", [False, True])
def test_slices_whose_units_nothing_says_keep_their_ids_with_a_note(tmp_path: Path, listing: bool) -> None:
    units = units_of(unit("", SHAPES), use_orig_params=False)
    source = adam(tmp_path, units)
    found = shown(source, listing=listing)
    assert keys(found) == [0]
    (note,) = found.notes
    assert note.kind == "unnamed"
    assert note.message == (
        f"optimizer state stays keyed by id: no units file says what each flat parameter of {source.source} contains"
    )


def test_given_units_that_leave_something_open_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_question(*_: object) -> ResolvedUnits:
        raise NeedsInformationError("several units match")

    monkeypatch.setattr("fsdpckpt.flat.logical.source_units", open_question)
    units = units_of(unit("", SHAPES), use_orig_params=False)
    with pytest.raises(NeedsInformationError, match="several units match"):
        shown(adam(tmp_path, units), units_file(tmp_path, units))


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("listing", [False, True])
def test_units_of_another_model_are_an_error_or_problems_for_a_caller_that_lists_them(
    tmp_path: Path, listing: bool, given: bool
) -> None:
    other = units_of(unit("", {"w": (5,)}), unit("b", {"w": (5,)}), use_orig_params=False)
    source = adam(tmp_path, units_of(unit("", SHAPES), use_orig_params=False))
    path = units_file(tmp_path, other) if given else None
    source = source if given else with_origin(replace(source, units=other), units_from="units.json")
    if not listing or given:
        with pytest.raises(SourceCorruptError, match="are not those of"):
            shown(source, path, listing=listing)
        return
    found = shown(source, listing=True)
    assert keys(found) == [0]
    assert [(problem.kind, problem.file) for problem in found.problems] == [("units", "units.json")]
    assert found.problems[0].message == (
        f"the units of units.json are not those of {source.source}: param group 0 lists 1 parameter, the units have 2"
    )


@pytest.mark.parametrize("listing", [False, True])
def test_padding_with_values_is_an_error_or_a_problem(tmp_path: Path, listing: bool) -> None:
    units = units_of(unit("", SHAPES), use_orig_params=False)
    shorter = units_of(unit("", {name: SHAPES[name] for name in ("e.weight", "h.bias")}), use_orig_params=False)
    source = replace(adam(tmp_path, units), units=shorter)
    if not listing:
        with pytest.raises(SourceCorruptError, match="padding"):
            shown(source)
        return
    found = shown(source, listing=True)
    assert keys(found) == [0]
    (problem,) = found.problems
    assert problem.kind == "units" and "what is padding in the units holds values of a parameter" in problem.message


@pytest.mark.parametrize("listing", [False, True])
def test_replicas_are_compared_unless_the_caller_does_so(tmp_path: Path, listing: bool) -> None:
    source = replace(adam(tmp_path, hybrid()), units=hybrid())
    assert source.optim is not None
    slices_ = source.optim.state[0]["sum"]
    assert isinstance(slices_, Tensor)
    source = with_checksums(source, slices_, 3)
    if listing:
        assert keys(shown(source, listing=True)) == list(SHAPES)
    else:
        with pytest.raises(SourceCorruptError, match="hold different bytes of the same shard"):
            shown(source)


def test_a_problem_of_a_slice_is_not_repeated_beside_that_of_its_parameter(tmp_path: Path) -> None:
    units = units_of(unit("", SHAPES), unit("b", {"w": (4,)}), use_orig_params=False)
    source = adam(tmp_path, units)
    assert source.optim is not None
    source.optim = without_entry(source.optim, 1)
    damage = Problem("crc", "rank 1 is damaged")
    (stateless,) = problems(source)
    found = shown(with_ledger(replace(source, units=units), problems=(stateless, damage)))
    assert keys(found) == list(SHAPES)
    assert found.problems == (damage,)
    assert [problem.message for problem in problems(found)] == [
        "optim b.w: in param group 0, but has no optimizer state"
    ]


@pytest.mark.parametrize("listing", [False, True])
def test_slices_that_cannot_be_named_keep_their_ids_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: bool
) -> None:
    def refuse(*_: object, **__: object) -> Checkpoint:
        raise SourceUnsupportedError("slices begin inside blocks", details=["w: rank 1", "w: rank 2"])

    monkeypatch.setattr("fsdpckpt.flat.logical.name_slices", refuse)
    units = units_of(unit("", SHAPES), use_orig_params=False)
    found = shown(replace(adam(tmp_path, units), units=units), listing=listing)
    assert keys(found) == [0]
    message = "optimizer state stays keyed by id: slices begin inside blocks; w: rank 1"
    assert found.notes[-1] == Note("unnamed", message, for_verify=True)
