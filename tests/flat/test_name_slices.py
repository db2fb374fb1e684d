"""Whether a source is in slices of flat parameters: seen in it, or, of one rank, said by units and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.flat.unflatten import name_slices
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.flat.units.request import ResolvedUnits, UnitsRequest
from fsdpckpt.flat.units.source import is_flattened
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, ModelState, OptimState, ParamKey
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Strategy, Units
from fsdpckpt.ir.units_json import encode, render
from fsdpckpt.ir.values import Value
from fsdpckpt.storage.sources import Sources
from tests.flat.flat_checkpoints import Played, unit, units_of
from tests.flat.flat_synthetic import checkpoint, local_model, named, optimizer, sharded_model, slices, whole
from tests.flat.test_proofs import SHAPES, adagrad, proved, with_checksums, written

PARAMS = (named("a.weight", 5, 3), named("a.bias", 5), named("b.weight", 2, 5))
UNITS = build_units(PARAMS, ("", "a"), Settings(use_orig_params=False))


def said(source: Checkpoint, request: UnitsRequest | None = None) -> bool:
    with Sources() as sources:
        return is_flattened(source, sources, request)


def optim(*leaves: Tensor | Value, by: Sequence[ParamKey] = (0, 1, 2)) -> OptimState:
    state: dict[ParamKey, dict[str, Tensor | Value]] = {
        key: {"step": whole(), "mode": "fast", "exp_avg": leaf} for key, leaf in zip(by, leaves, strict=False)
    }
    return OptimState(state, [{"lr": 0.1, "params": list(by)}])


def one_rank(units: Units = UNITS, *, layout: Layout = Layout.FULL, model: ModelState | None = None) -> Checkpoint:
    """What one rank's raw optimizer looks like: whole vectors."""
    raw = optimizer(units, 1)
    state = {
        key: {name: replace(leaf, sharded=None) if isinstance(leaf, Tensor) else leaf for name, leaf in states.items()}
        for key, states in raw.state.items()
    }
    return checkpoint(1, model=model, optim=OptimState(dict(state), raw.param_groups), layout=layout)


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
    assert not said(replace(source, world_size=2), request)
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
    assert not said(replace(source, units=UNITS, layout=Layout.FLATTENED))


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
