"""Whether a source is in slices of flat parameters: seen in it, or, of one rank, said by units and options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import Strategy, Units
from fsdpckpt.ir.units_json import encode, render
from fsdpckpt.ir.values import Value
from fsdpckpt.storage.sources import Sources
from tests.flat.flat_checkpoints import Played, unit, units_of
from tests.flat.flat_synthetic import checkpoint, local_model, named, optimizer, sharded_model, slices, whole
from tests.flat.test_proofs import SHAPES, padded, proved, with_checksums, written
from tests.ir.checkpoints import with_ledger, with_origin
from tests.ir.optimizers import without_entry

PARAMS = (named("a.weight", 5, 3), named("a.bias", 5), named("b.weight", 2, 5))
UNITS, LONGER = (
    build_units(params, ("", "a"), Settings(use_orig_params=False))
    for params in (PARAMS, (*PARAMS, named("b.bias", 7)))
)
MODEL, VECTORS = sharded_model(PARAMS), sharded_model((named("a", 5), named("b", 7)))


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


def of_vectors(**more: Tensor | Value) -> Checkpoint:
    model = ModelState({**VECTORS.params, **more})
    return checkpoint(1, model=model, optim=optim(whole(5), whole(7)), layout=Layout.FULL)


RAW, NAMED = one_rank(), checkpoint(1, optim=optim(whole(5), by=["w"]), layout=Layout.FULL)
A, NONE = UnitsRequest(globs=("a",)), UnitsRequest(globs=("none",))
FLATTENED: dict[str, tuple[Checkpoint, UnitsRequest | Units | None]] = {
    "flat parameters": (checkpoint(2, model=local_model(UNITS, 2)), None),
    "slices": (checkpoint(2, optim=optim(slices([4, 3]))), None),
    "slices by name": (checkpoint(2, optim=optim(slices([4, 3]), by=["w"])), None),
    "a slice behind a whole tensor": (checkpoint(2, model=MODEL, optim=optim(whole(5), slices([4, 3]))), None),
    "vectors of one rank and units beside them": (replace(RAW, units=UNITS), None),
    "and units that are given": (RAW, UNITS),
    "and paths of units": (RAW, A),
    "and paths of units, beside a sharded model": (one_rank(model=MODEL), A),
    "a directory that says so, whose units are proved later": (
        replace(one_rank(layout=Layout.FLATTENED), units=LONGER), None
    ),
    "vectors beside no model": (replace(of_vectors(), model=ModelState({})), NONE),
    "vectors, although a parameter is none": (of_vectors(w=whole(2, 3)), NONE),
}  # fmt: skip
WHOLE: dict[str, tuple[Checkpoint, UnitsRequest | Units | None]] = {
    "a sharded model": (checkpoint(2, model=MODEL), None),
    "whole states": (checkpoint(2, model=MODEL, optim=optim(whole(5, 3), whole(5), whole(2, 5))), None),
    "nothing": (checkpoint(2), None),
    "vectors of one rank": (RAW, None),
    "vectors of one rank, and no path": (RAW, UnitsRequest()),
    "and other units beside them": (replace(RAW, units=LONGER), None),
    "other units beside them than those that are given": (replace(RAW, units=LONGER), UNITS),
    "other units that are given": (one_rank(LONGER), UNITS),
    "matrices, whatever units lie beside them": (
        checkpoint(1, optim=optim(whole(5, 3), whole(5)), layout=Layout.FULL, units=UNITS), None
    ),
    "vectors of two ranks": (with_origin(RAW, world_size=2), A),
    "a matrix among vectors": (replace(RAW, optim=optim(whole(5), whole(5, 3))), A),
    "no states": (replace(RAW, optim=optim(by=())), A),
    "vectors of a model of vectors": (of_vectors(), NONE),
    "vectors of a model of vectors and a text": (of_vectors(note="text"), NONE),
    "names, which are no ids of flat parameters": (NAMED, NONE),
    "names, although the directory says so": (
        with_origin(replace(NAMED, units=UNITS), layout=Layout.FLATTENED), None
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*FLATTENED, *WHOLE])
def test_whether_a_checkpoint_is_in_slices_is_seen_or_said(name: str, tmp_path: Path) -> None:
    source, given = {**FLATTENED, **WHOLE}[name]
    request = UnitsRequest(file=units_file(tmp_path, given)) if isinstance(given, Units) else given
    with Sources() as sources:
        assert is_flattened(source, sources, request) is (name in FLATTENED)


def test_units_of_names_alone_change_nothing() -> None:
    with Sources() as sources:
        assert name_slices(RAW, ResolvedUnits(UNITS, None, ("inferred",)), sources) is RAW


FLAT = units_of(unit("", SHAPES), use_orig_params=False)
HYBRID = units_of(replace(unit("", SHAPES), strategy=Strategy.HYBRID_SHARD), use_orig_params=False, shard_size=2)
SHORTER = units_of(unit("", {name: SHAPES[name] for name in ("e.weight", "h.bias")}), use_orig_params=False)
OTHER = units_of(unit("", {"w": (5,)}), unit("b", {"w": (5,)}), use_orig_params=False)


def saved(tmp_path: Path, units: Units) -> Checkpoint:
    played = Played(units, 4)
    return written(played, tmp_path, optim=padded(units, played))


def replicas(tmp_path: Path, change: int | None) -> Checkpoint:
    """Of hybrid shards, of which one has other bytes."""
    source = saved(tmp_path, HYBRID)
    assert source.optim is not None
    slices_ = source.optim.state[0]["sum"]
    assert isinstance(slices_, Tensor)
    return with_checksums(source, slices_, change)


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


@pytest.mark.parametrize("change", [None, 3])
def test_slices_get_their_names_once_padding_and_replicas_are_proved(tmp_path: Path, change: int | None) -> None:
    source = replicas(tmp_path, change)
    found = ResolvedUnits(HYBRID, proved(source, HYBRID), ("how they were found",))
    with Sources() as sources:
        if change is not None:
            with pytest.raises(SourceCorruptError):
                name_slices(source, found, sources)
        named_ = name_slices(source, found, sources, replicas=change is None)
    assert keys(named_) == list(SHAPES)
    messages = [note.message for note in named_.notes]
    assert "how they were found" in messages
    assert any(line.startswith("2 replicas of slices compared") for line in messages) is (change is None)


@pytest.mark.parametrize(("shapes", "noted"), [(SHAPES, True), ({"w": (2, 8)}, False)])
def test_padding_that_was_checked_is_noted(tmp_path: Path, shapes: dict[str, tuple[int, ...]], noted: bool) -> None:
    units = units_of(unit("", shapes), use_orig_params=False)
    source = saved(tmp_path, units)
    with Sources() as sources:
        found = name_slices(source, ResolvedUnits(units, proved(source, units), ()), sources)
    lines = [note.message for note in found.notes if "of padding" in note.message]
    assert lines == (["1 elements of padding hold what FSDP1 writes there"] if noted else [])


# ``logical``: what inspect, verify, diff and open show of a flattened checkpoint.


def test_a_checkpoint_without_slices_is_shown_as_it_is() -> None:
    source = checkpoint(2, model=MODEL, units=UNITS)
    assert shown(source) is source


@dataclass(frozen=True)
class Row:
    """``refused``: how, for a caller that does not list problems, or, with ``given`` units, for any. Otherwise ``keys``
    of the optimizer, ``problem`` or ``note``.
    """

    source: Callable[[Path], Checkpoint]
    keys: Sequence[ParamKey] = (0,)
    refused: str | None = None
    given: Units | None = None
    problem: tuple[str, str] | None = None
    note: str | None = None


ROWS = {
    "units that nothing says": Row(
        lambda path: saved(path, FLAT),
        note="optimizer state stays keyed by id: no units file says what each flat parameter of ranks contains",
    ),
    "units of another model": Row(
        lambda path: with_origin(replace(saved(path, FLAT), units=OTHER), units_from="units.json"),
        refused="are not those of",
        problem=(
            "units.json",
            "the units of units.json are not those of ranks: param group 0 lists 1 parameter, the units have 2",
        ),
    ),
    "given units of another model": Row(lambda path: saved(path, FLAT), refused="are not those of", given=OTHER),
    "padding with values": Row(
        lambda path: replace(saved(path, FLAT), units=SHORTER),
        refused="padding",
        problem=("ranks", "what is padding in the units holds values of a parameter"),
    ),
    "replicas that differ, which a caller that lists problems compares itself": Row(
        lambda path: replace(replicas(path, 3), units=HYBRID),
        keys=list(SHAPES),
        refused="hold different bytes of the same shard",
    ),
}


@pytest.mark.parametrize("listing", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_what_contradicts_units_is_an_error_or_a_problem_for_a_caller_that_lists_them(
    name: str, listing: bool, tmp_path: Path
) -> None:
    row = ROWS[name]
    source, given = row.source(tmp_path), None if row.given is None else units_file(tmp_path, row.given)
    if row.refused is not None and (given or not listing):
        with pytest.raises(SourceCorruptError, match=row.refused):
            shown(source, given, listing=listing)
        return
    found = shown(source, listing=listing)
    assert keys(found) == list(row.keys)
    assert row.note is None or [(note.kind, note.message) for note in found.notes] == [("unnamed", row.note)]
    if row.problem is None:
        assert not found.problems
    else:
        (problem,) = found.problems
        assert (problem.kind, problem.file) == ("units", row.problem[0]) and row.problem[1] in problem.message


def test_given_units_that_leave_something_open_are_an_error(tmp_path: Path) -> None:
    names_alone = units_of_lists((), tuple(SHAPES), use_orig_params=True, unmanaged=FLAT.units[0].params)
    with pytest.raises(NeedsInformationError, match="does not say which modules were FSDP units"):
        shown(saved(tmp_path, FLAT), units_file(tmp_path, names_alone))


def test_a_problem_of_a_slice_is_not_repeated_beside_that_of_its_parameter(tmp_path: Path) -> None:
    units = units_of(unit("", SHAPES), unit("b", {"w": (4,)}), use_orig_params=False)
    source = saved(tmp_path, units)
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
    found = shown(replace(saved(tmp_path, FLAT), units=FLAT), listing=listing)
    assert keys(found) == [0]
    message = "optimizer state stays keyed by id: slices begin inside blocks; w: rank 1"
    assert found.notes[-1] == Note("unnamed", message, for_verify=True)
