"""Where the units of a source and of a target come from, and what is refused."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fsdpckpt.errors import (
    NeedsInformationError,
    SourceCorruptError,
    SourceMissingError,
    SourceUnsupportedError,
    TargetUnwritableError,
    UsageError,
)
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.flat.units.request import ResolvedUnits, UnitsRequest, write_units
from fsdpckpt.flat.units.source import find_units, source_units
from fsdpckpt.flat.units.target import target_units
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, ModelState
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.units import Strategy, Units
from fsdpckpt.ir.units_json import encode
from fsdpckpt.storage.sources import Sources
from tests.flat.flat_synthetic import checkpoint, local_model, named, optimizer, sharded_model, whole
from tests.ir.relisted import relisted

BF16 = DTYPES["bfloat16"]
PARAMS = (
    named("e.weight", 17, 9),
    named("l.0.a.weight", 28, 9),
    named("l.0.a.bias", 28),
    named("l.1.a.weight", 28, 9),
    named("l.1.a.bias", 28),
    named("h.weight", 5, 9),
)
LAYERS = ("", "l.0", "l.1")


def units_of(*, orig: bool = False, params: Sequence[Parameter] = PARAMS, prefixes: Sequence[str] = LAYERS) -> Units:
    return build_units(params, prefixes, Settings(orig))


@pytest.fixture
def sources() -> Iterator[Sources]:
    with Sources() as opened:
        yield opened


def saved(path: Path, units: Units) -> str:
    file = path / "given.json"
    file.write_text(json.dumps(encode(units)))
    return str(file)


def saved_model(path: Path, params: Sequence[Parameter] = PARAMS, *, suffix: str = ".pt") -> str:
    file = path / f"reference{suffix}"
    tensors = {param.name: torch.rand(param.shape) for param in params}
    if suffix == ".pt":
        torch.save(tensors, file)
    else:
        save_file(tensors, file)
    return str(file)


def raw(world_size: int = 4, *, orig: bool = False, beside: Units | None = None) -> Checkpoint:
    return checkpoint(world_size, optim=optimizer(units_of(orig=orig), world_size), units=beside)


def by_name(params: Sequence[Parameter] = PARAMS, *, groups: Sequence[Sequence[str]] | None = None) -> Optimizer:
    listed = groups if groups is not None else [[param.name for param in params]]
    shapes = {param.name: param.shape for param in params}
    names = [name for group in listed for name in group]
    state = {name: {"step": whole(), "exp_avg": whole(*shapes[name], file=1)} for name in names}
    return Optimizer.of(dict(state), [{"lr": 0.1, "params": list(group)} for group in listed])


def full(params: Sequence[Parameter] = PARAMS, optim: Optimizer | None = None, **rest: object) -> Checkpoint:
    held = optim if optim is not None else by_name(params)
    return checkpoint(1, model=sharded_model(params), optim=held, layout=Layout.FULL, **rest)  # type: ignore[arg-type]


# Sources.


def test_units_beside_the_source_are_used_and_proved(sources: Sources) -> None:
    found = source_units(raw(beside=units_of()), UnitsRequest(), sources)
    assert found.units == units_of()
    assert found.match is not None
    assert dict(found.match.keys) == {0: "_flat_param", 1: "l.0._flat_param", 2: "l.1._flat_param"}
    assert found.how == ("units: from run/step-7/units.json",)


def test_a_given_units_file_goes_before_the_one_beside(tmp_path: Path, sources: Sources) -> None:
    wrong = units_of(prefixes=("", "l.0"))
    with pytest.raises(SourceCorruptError, match="not those of"):
        source_units(raw(beside=units_of()), UnitsRequest(file=saved(tmp_path, wrong)), sources)


def test_for_a_flattened_target_the_units_beside_the_source_are_the_sources(tmp_path: Path, sources: Sources) -> None:
    request = UnitsRequest(file=saved(tmp_path, units_of(prefixes=("",))), use_orig_params=True)
    found = source_units(raw(beside=units_of()), request, sources, target_flattened=True)
    assert found.units == units_of()


def test_for_a_flattened_target_the_given_file_serves_a_source_with_nothing_beside_it(
    tmp_path: Path, sources: Sources
) -> None:
    request = UnitsRequest(file=saved(tmp_path, units_of()))
    assert source_units(raw(), request, sources, target_flattened=True).units == units_of()


def test_the_targets_file_serves_the_source_under_the_settings_that_the_source_proves(
    tmp_path: Path, sources: Sources
) -> None:
    request = UnitsRequest(file=saved(tmp_path, units_of(orig=True)), use_orig_params=True)
    found = source_units(raw(orig=False), request, sources, target_flattened=True)
    assert found.units.use_orig_params is False
    with pytest.raises(SourceCorruptError):
        source_units(raw(orig=False), request, sources)


def test_units_recorded_on_another_number_of_ranks_are_refused_for_a_source(tmp_path: Path, sources: Sources) -> None:
    recorded = replace(units_of(), world_size=8)
    with pytest.raises(SourceCorruptError, match="not those of") as caught:
        source_units(raw(4, beside=recorded), UnitsRequest(), sources)
    assert any("8 ranks" in detail for detail in caught.value.details)


def test_a_reference_that_contradicts_the_units_file_is_refused_with_every_contradiction(
    tmp_path: Path, sources: Sources
) -> None:
    other = [replace(one, shape=one.shape[::-1]) if one.name == "l.0.a.weight" else one for one in PARAMS[:-1]]
    request = UnitsRequest(reference=saved_model(tmp_path, other))
    with pytest.raises(SourceCorruptError) as caught:
        source_units(raw(beside=units_of()), request, sources)
    h, weight = caught.value.details
    assert h.startswith("h.weight is in the units, not in")
    assert weight.startswith("l.0.a.weight: [28, 9] in the units, [9, 28] in")


def test_parameters_in_another_order_than_the_units_file_says_are_refused(sources: Sources) -> None:
    order = tuple(param.name for param in PARAMS)
    with pytest.raises(SourceCorruptError) as caught:
        source_units(raw(beside=units_of()), UnitsRequest(parameters=order[::-1]), sources)
    assert "--parameters" in caught.value.details[0]


def test_settings_that_contradict_proved_units_are_the_mistake_not_the_units(sources: Sources) -> None:
    request = UnitsRequest(use_orig_params=True, param_dtype=BF16)
    with pytest.raises(UsageError, match="use_orig_params=True, param_dtype='bfloat16': that is not how") as caught:
        source_units(raw(beside=units_of()), request, sources)
    assert caught.value.next_step == "drop --use-orig-params and --param-dtype bfloat16"
    # Lengths that are the same either way contradict nothing.
    assert source_units(raw(beside=units_of()), UnitsRequest(param_dtype=BF16), sources).match is not None


def test_unit_globs_that_contradict_the_units_file_are_refused(tmp_path: Path, sources: Sources) -> None:
    assert source_units(raw(beside=units_of()), UnitsRequest(globs=("l.*",)), sources).units == units_of()
    request = UnitsRequest(globs=("l.0",))
    with pytest.raises(SourceCorruptError, match="unit contradicts the units of run/step-7") as caught:
        source_units(raw(beside=units_of()), request, sources)
    assert caught.value.details == (
        "l.1.a.weight is in unit 'l.1' according to the units, in the root unit according to --unit",
    )
    given = replace(request, file=saved(tmp_path, units_of()))
    with pytest.raises(SourceCorruptError, match="unit contradicts"):
        target_units(full(), given, None, 4, sources)


def test_a_directory_or_nothing_where_the_units_file_should_be_is_said(tmp_path: Path, sources: Sources) -> None:
    with pytest.raises(SourceMissingError, match="is a directory"):
        source_units(raw(), UnitsRequest(file=str(tmp_path)), sources)
    (tmp_path / "units.json").write_text("{}")
    with pytest.raises(SourceMissingError) as caught:
        source_units(raw(), UnitsRequest(file=str(tmp_path)), sources)
    assert caught.value.next_step == f"--units {tmp_path / 'units.json'}"
    for path in ("", str(tmp_path / "none.json")):
        with pytest.raises(SourceMissingError, match="does not exist"):
            source_units(raw(), UnitsRequest(file=path), sources)


def test_units_beside_the_source_that_cannot_be_read_are_not_replaced_by_others(sources: Sources) -> None:
    source = raw()
    refused = ("run/units.json: cut: these units are not used",)
    source.origin = replace(source.origin, units_refused=refused)
    with pytest.raises(SourceCorruptError) as caught:
        source_units(source, UnitsRequest(), sources)
    assert caught.value.details == refused


@pytest.mark.parametrize("orig", [False, True])
def test_a_reference_and_unit_globs_give_the_units(orig: bool, tmp_path: Path, sources: Sources) -> None:
    request = UnitsRequest(globs=("l.*",), reference=saved_model(tmp_path))
    found = source_units(raw(orig=orig), request, sources)
    assert found.units.units == units_of(orig=orig).units
    assert found.units.use_orig_params is orig
    assert "--unit 'l.*'" in found.how[0]


def test_a_reference_of_another_model_is_refused(tmp_path: Path, sources: Sources) -> None:
    other = [*PARAMS[:-1], named("h.weight", 6, 9)]
    request = UnitsRequest(globs=("l.*",), reference=saved_model(tmp_path, other))
    with pytest.raises(NeedsInformationError, match="cannot be inferred") as caught:
        source_units(raw(), request, sources)
    assert any("elements" in detail for detail in caught.value.details)


def test_a_sorted_reference_is_refused_until_the_order_is_given(tmp_path: Path, sources: Sources) -> None:
    reference = saved_model(tmp_path, suffix=".safetensors")
    request = UnitsRequest(globs=("l.*",), reference=reference)
    with pytest.raises(NeedsInformationError, match="order"):
        source_units(raw(), request, sources)
    order = tuple(param.name for param in PARAMS)
    found = source_units(raw(), replace(request, parameters=order), sources)
    assert found.units.units == units_of().units


def test_a_source_without_names_says_what_its_slices_show(sources: Sources) -> None:
    with pytest.raises(NeedsInformationError) as caught:
        source_units(raw(), UnitsRequest(), sources)
    assert "2 optimizer keys with slices of 70 elements on every rank" in caught.value.details
    assert "--units" in str(caught.value.next_step)


def test_a_source_whose_wrapping_nothing_shows_asks_for_it(tmp_path: Path, sources: Sources) -> None:
    with pytest.raises(NeedsInformationError, match="which modules") as caught:
        source_units(raw(), UnitsRequest(reference=saved_model(tmp_path)), sources)
    assert "for example --unit 'l.*'" in str(caught.value.next_step), "the layers that this model has"


def test_model_files_beside_flattened_optimizer_files_give_names_and_order(sources: Sources) -> None:
    """As verl writes: DTensor model files, where plain tensors are buffers."""
    model = sharded_model((*PARAMS, named("position", 64, sharded=False)))
    source = checkpoint(4, model=model, optim=optimizer(units_of(), 4))
    found = source_units(source, UnitsRequest(globs=("l.*",)), sources)
    assert found.units.units == units_of().units


def test_flat_parameters_in_the_model_name_the_units(tmp_path: Path, sources: Sources) -> None:
    source = checkpoint(4, model=local_model(units_of(), 4), optim=optimizer(units_of(), 4))
    found = source_units(source, UnitsRequest(reference=saved_model(tmp_path)), sources)
    assert found.units.units == units_of().units


def test_units_given_by_glob_have_to_be_those_the_checkpoint_names(tmp_path: Path, sources: Sources) -> None:
    source = checkpoint(4, model=local_model(units_of(), 4))
    request = UnitsRequest(globs=("l.0",), reference=saved_model(tmp_path))
    with pytest.raises(UsageError) as caught:
        source_units(source, request, sources)
    assert caught.value.details == ("l.1 is a unit according to the flat parameters' keys, and no --unit matches it",)


def test_a_frozen_unit_that_param_names_cannot_show_is_given_by_glob(tmp_path: Path, sources: Sources) -> None:
    names = ["_fsdp_wrapped_module._flat_param", "_fsdp_wrapped_module.l.1._fsdp_wrapped_module._flat_param"]
    groups = [("_flat_param", "l.1._flat_param")]
    optim = optimizer(units_of(), 4, groups=groups, param_names=[names])
    source = checkpoint(4, optim=optim)
    request = UnitsRequest(reference=saved_model(tmp_path))
    with pytest.raises(NeedsInformationError, match="cannot be inferred"):
        source_units(source, request, sources)
    found = source_units(source, replace(request, globs=("l.*",)), sources)
    assert found.units.units == units_of().units


def test_by_name_optimizer_files_beside_flat_parameters_give_names_and_shapes(sources: Sources) -> None:
    """As accelerate writes LOCAL_STATE_DICT: no reference is needed."""
    source = checkpoint(4, model=local_model(units_of(), 4), optim=by_name())
    assert source_units(source, UnitsRequest(), sources).units.units == units_of().units


def test_slices_by_name_give_the_order_that_a_sorted_reference_lacks(tmp_path: Path, sources: Sources) -> None:
    truth = units_of(orig=True)
    source = checkpoint(4, model=local_model(truth, 4, by_name=True))
    request = UnitsRequest(reference=saved_model(tmp_path, suffix=".safetensors"))
    assert source_units(source, request, sources).units.units == truth.units


def test_a_glob_that_matches_nothing_shows_the_modules_there_are(tmp_path: Path, sources: Sources) -> None:
    request = UnitsRequest(globs=("layers.*",), reference=saved_model(tmp_path))
    with pytest.raises(UsageError) as caught:
        source_units(raw(), request, sources)
    assert caught.value.details == ("e", "l", "l.{0..1}", "l.{0..1}.a", "h")
    assert str(caught.value.next_step).startswith("--unit 'l.*' for every layer")


# Targets.


def test_a_target_keeps_the_wrapping_and_settings_of_its_source(sources: Sources) -> None:
    source = ResolvedUnits(units_of(orig=True), None, ())
    found = target_units(full(), UnitsRequest(), source, 3, sources)
    assert found.units == relisted(units_of(orig=True), world_size=3, groups=(tuple(param.name for param in PARAMS),))
    assert found.how[1] == "target units: use_orig_params=True, full-shard, aligned for float32"
    assert not any("--param-dtype" in line for line in found.how)  # the source's own slices prove the alignment


def test_options_change_the_settings_and_the_groups_follow(sources: Sources) -> None:
    units = units_of(orig=True).with_groups((tuple(param.name for param in PARAMS),))
    source = ResolvedUnits(units, None, ())
    request = UnitsRequest(use_orig_params=False, strategy=Strategy.HYBRID_SHARD, shard_size=2, param_dtype=BF16)
    found = target_units(full(), request, source, 4, sources).units
    assert found.groups == (("_flat_param", "l.0._flat_param", "l.1._flat_param"),)
    assert found.shard_size == 2
    assert {(unit.strategy, unit.param_dtype) for unit in found.units} == {(Strategy.HYBRID_SHARD, BF16)}


def test_another_wrapping_by_globs_takes_the_names_of_the_source(sources: Sources) -> None:
    found = target_units(full(), UnitsRequest(globs=("none",)), ResolvedUnits(units_of(), None, ()), 4, sources).units
    assert [unit.prefix for unit in found.units] == [""]
    assert [param.name for param in found.units[0].params] == [param.name for param in PARAMS]


def test_a_target_of_whole_tensors_needs_wrapping_and_use_orig_params(sources: Sources) -> None:
    with pytest.raises(NeedsInformationError, match="which modules") as caught:
        target_units(full(), UnitsRequest(), None, 4, sources)
    assert "for example --unit 'l.*'" in str(caught.value.next_step)
    with pytest.raises(NeedsInformationError, match="use_orig_params") as caught:
        target_units(full(), UnitsRequest(globs=("l.*",)), None, 4, sources)
    assert "--no-use-orig-params" in str(caught.value.next_step)
    found = target_units(full(), UnitsRequest(globs=("l.*",), use_orig_params=True), None, 4, sources)
    assert found.units.units == units_of(orig=True).units


def test_settings_that_the_source_did_not_show_are_asked_for_the_target(sources: Sources) -> None:
    source = ResolvedUnits(units_of(), None, (), open_settings=("use_orig_params",))
    with pytest.raises(NeedsInformationError, match="use_orig_params"):
        target_units(full(), UnitsRequest(), source, 4, sources)
    assert target_units(full(), UnitsRequest(use_orig_params=False), source, 4, sources).units.units == units_of().units


def test_units_of_another_model_are_refused_with_every_difference(tmp_path: Path, sources: Sources) -> None:
    other = [
        replace(PARAMS[0], shape=(9, 17)),
        replace(PARAMS[1], name="l.0.b.weight"),
        *(replace(one, dtype=BF16) if one.name.startswith("l.1") else one for one in PARAMS[2:]),
    ]
    request = UnitsRequest(file=saved(tmp_path, units_of(params=other)))
    with pytest.raises(SourceCorruptError, match="do not describe") as caught:
        target_units(full(), request, None, 4, sources)
    text = "\n".join(caught.value.details)
    for said in (
        "e.weight: [9, 17] in the units, [17, 9] in the model",
        "l.0.b.weight is in the units",
        "parameter l.0.a.weight",
        "l.1.a.bias: bfloat16",
    ):
        assert said in text


def test_units_in_another_order_than_the_model_section_are_refused(tmp_path: Path, sources: Sources) -> None:
    params = (named("a.weight", 6, 7), named("b.weight", 6, 7))
    units = build_units(params[::-1], ("",), Settings(use_orig_params=False))
    with pytest.raises(SourceCorruptError, match="do not describe"):
        target_units(full(params), UnitsRequest(file=saved(tmp_path, units)), None, 2, sources)


def test_without_a_model_section_the_shapes_of_the_states_have_to_agree(sources: Sources) -> None:
    other_units = units_of(params=[replace(PARAMS[0], shape=(9, 17)), *PARAMS[1:]])
    other = ResolvedUnits(other_units, None, ())
    with pytest.raises(SourceCorruptError) as caught:
        target_units(replace(full(), model=None), UnitsRequest(), other, 4, sources)
    assert caught.value.details == ("e.weight: [9, 17] in the units, its optimizer states are [17, 9]",)


def test_names_in_an_order_that_no_module_has_are_refused(sources: Sources) -> None:
    """As of a dict that a script put together: what FSDP1 would flatten first is not known."""
    request = UnitsRequest(globs=("l.*",), use_orig_params=True)
    params = (*PARAMS, named("position", 64))
    with pytest.raises(NeedsInformationError, match="the model section does not keep it") as caught:
        target_units(full(params, by_name()), request, None, 4, sources)
    assert "--parameters FILE" in str(caught.value.next_step)
    order = ("position", *(param.name for param in PARAMS))
    found = target_units(full(params, by_name()), replace(request, parameters=order), None, 4, sources)
    assert found.units.parameters == order


def test_names_that_may_be_buffers_are_asked_about(sources: Sources) -> None:
    params = (named("position", 64, sharded=None), *PARAMS)
    request = UnitsRequest(globs=("l.*",), use_orig_params=False)
    with pytest.raises(NeedsInformationError) as caught:
        target_units(full(params, by_name()), request, None, 4, sources)
    assert caught.value.details == ("position may be a parameter or a buffer",)
    order = tuple(param.name for param in PARAMS)
    found = target_units(full(params, by_name()), replace(request, parameters=order), None, 4, sources)
    assert "position" not in found.units.params()


def test_what_buffers_says_is_no_longer_asked(sources: Sources) -> None:
    params = (named("position", 64, sharded=None), *PARAMS)
    request = UnitsRequest(globs=("l.*",), use_orig_params=True, buffers=("pos*",))
    found = target_units(full(params, by_name()), request, None, 4, sources).units
    assert found.parameters == tuple(param.name for param in PARAMS)
    found = target_units(full(params, by_name()), replace(request, buffers=("none",)), None, 4, sources).units
    assert found.parameters[0] == "position"
    assert not found.params()["position"].requires_grad  # it has no optimizer state
    with pytest.raises(UsageError, match="buffers='mask' matches no name"):
        target_units(full(params, by_name()), replace(request, buffers=("pos*", "mask")), None, 4, sources)


def test_a_list_of_parameters_that_lacks_some_with_states_is_refused(sources: Sources) -> None:
    request = UnitsRequest(globs=("l.*",), use_orig_params=False)
    order = tuple(param.name for param in PARAMS)
    with pytest.raises(SourceCorruptError, match="parameters does not list 2 of") as caught:
        target_units(full(), replace(request, parameters=order[:-2]), None, 4, sources)
    assert caught.value.details == order[-2:]


def test_a_list_that_is_neither_the_models_order_nor_the_optimizers_is_refused(sources: Sources) -> None:
    request = UnitsRequest(globs=("l.*",), use_orig_params=True)
    order = tuple(param.name for param in PARAMS)
    groups = (order[:2], order[2:])
    in_groups = full(optim=by_name(groups=groups))
    with pytest.raises(SourceCorruptError, match="do not describe") as caught:
        target_units(in_groups, replace(request, parameters=order[::-1]), None, 4, sources)
    assert "--parameters" in str(caught.value.why)
    of_optimizer = (*groups[0][::-1], *groups[1])
    found = target_units(in_groups, replace(request, parameters=of_optimizer), None, 4, sources)
    assert found.units.parameters == order
    assert found.units.groups == (groups[0][::-1], groups[1])


def test_an_alignment_that_nothing_proves_is_mentioned(sources: Sources) -> None:
    source = ResolvedUnits(units_of(), None, ())
    found = target_units(full(), UnitsRequest(use_orig_params=True), source, 3, sources)
    assert any("--param-dtype" in line for line in found.how)
    found = target_units(full(), UnitsRequest(use_orig_params=True, param_dtype=BF16), source, 3, sources)
    assert not any("--param-dtype" in line for line in found.how)
    assert any("aligned for bfloat16" in line for line in found.how)


def test_a_parameter_without_state_that_may_be_a_shared_one_is_asked_about(sources: Sources) -> None:
    params = (*PARAMS[:-1], named("h.weight", 17, 9))
    optim = by_name(params, groups=[[param.name for param in PARAMS[:-1]]])
    request = UnitsRequest(globs=("l.*",), use_orig_params=False)
    with pytest.raises(NeedsInformationError) as caught:
        target_units(full(params, optim), request, None, 4, sources)
    assert "frozen, or shared with e.weight" in caught.value.details[0]


def test_stored_ties_are_shared_parameters(sources: Sources) -> None:
    source = full()
    assert source.model is not None
    model = ModelState({**source.model.params, "out.weight": source.model.params["e.weight"]})
    request = UnitsRequest(globs=("l.*",), use_orig_params=False)
    found = target_units(replace(source, model=model), request, None, 4, sources).units
    assert found.shared == (("out.weight", "e.weight"),)


def test_groups_are_recorded_so_that_the_ids_can_be_read_again(sources: Sources) -> None:
    names = [param.name for param in PARAMS]
    groups = [[name for name in names if "bias" not in name], [name for name in names if "bias" in name]]
    found = target_units(
        full(optim=by_name(groups=groups)), UnitsRequest(), ResolvedUnits(units_of(orig=True), None, ()), 4, sources
    ).units
    assert found.groups == tuple(map(tuple, groups))


def test_a_different_order_of_names_within_a_group_is_mentioned(sources: Sources) -> None:
    names = [param.name for param in PARAMS]
    request = UnitsRequest(globs=("l.*",), use_orig_params=True)
    own = "ids follow the optimizer's own groups, which are not in the order of the model in group 1"
    for last, ids, message in (
        (names[1:], names[1:], None),
        (names[:0:-1], names[:0:-1], own),
        (sorted(names[1:]), names[1:], None),
    ):
        resolved = target_units(full(optim=by_name(groups=[names[:1], last])), request, None, 4, sources)
        assert resolved.units.groups == (tuple(names[:1]), tuple(ids))
        assert [line for line in resolved.how if line == own] == ([message] if message else [])
        warned = [doubt for doubt in resolved.doubts if "sorted by name" in doubt and "units=FILE" in doubt]
        assert (len(warned), len(resolved.doubts)) == ((1, 1) if last == sorted(last) != names[1:] else (0, 0))


def test_a_unit_in_two_param_groups_needs_original_parameters(sources: Sources) -> None:
    names = [param.name for param in PARAMS]
    request = UnitsRequest(globs=("l.*",), use_orig_params=False)
    with pytest.raises(SourceUnsupportedError, match="divided") as caught:
        target_units(full(optim=by_name(groups=[names[::2], names[1::2]])), request, None, 4, sources)
    assert "in group 0; " in caught.value.details[0] and "--use-orig-params" in str(caught.value.next_step)
    partly = full(optim=Optimizer.of({}, by_name(groups=[names[:-1]]).param_groups))
    with pytest.raises(SourceUnsupportedError, match="divided") as caught:
        target_units(partly, UnitsRequest(), ResolvedUnits(units_of(), None, ()), 4, sources)
    assert f"{names[-1]} in no group" in caught.value.details[0]
    original = target_units(partly, UnitsRequest(), ResolvedUnits(units_of(orig=True), None, ()), 4, sources)
    assert original.units.groups == (tuple(names[:-1]),)


def test_hybrid_shard_needs_the_size_of_its_groups(sources: Sources) -> None:
    request = UnitsRequest(strategy=Strategy.HYBRID_SHARD)
    with pytest.raises(NeedsInformationError) as caught:
        target_units(full(), request, ResolvedUnits(units_of(), None, ()), 4, sources)
    assert "--shard-size" in str(caught.value.next_step)
    with pytest.raises(UsageError, match="divide"):
        target_units(full(), replace(request, shard_size=3), ResolvedUnits(units_of(), None, ()), 4, sources)
    with pytest.raises(UsageError, match="hybrid"):
        target_units(full(), UnitsRequest(shard_size=2), ResolvedUnits(units_of(), None, ()), 4, sources)


def test_a_single_sharding_group_does_not_show_how_other_numbers_of_ranks_are_grouped(sources: Sources) -> None:
    hybrid = Settings(strategy=Strategy.HYBRID_SHARD).applied_to(units_of())
    recorded = ResolvedUnits(replace(hybrid, world_size=4), None, ())
    same = target_units(full(), UnitsRequest(), recorded, 4, sources)
    assert (same.units.shard_size, same.units.world_size) == (None, 4)
    with pytest.raises(NeedsInformationError, match="record one group of 4 ranks, not how others"):
        target_units(full(), UnitsRequest(), recorded, 8, sources)
    assert target_units(full(), UnitsRequest(shard_size=4), recorded, 8, sources).units.shard_size == 4
    other_strategy = ResolvedUnits(replace(units_of(), world_size=4), None, ())
    with pytest.raises(NeedsInformationError, match="the size of a group is not recorded"):
        target_units(full(), UnitsRequest(strategy=Strategy.HYBRID_SHARD), other_strategy, 4, sources)


@pytest.mark.parametrize("globs", [(), ("l.*",)])
def test_one_rank_does_not_show_the_strategy_of_several_which_is_then_the_default(
    sources: Sources, globs: tuple[str, ...]
) -> None:
    """FSDP1 turns every strategy into NO_SHARD on one rank (``_init_core_state``)."""
    recorded = replace(Settings(strategy=Strategy.NO_SHARD).applied_to(units_of()), world_size=1)
    source, request = ResolvedUnits(recorded, None, ()), UnitsRequest(globs=globs)
    assert target_units(full(), request, source, 1, sources).units.world_size == 1
    several = target_units(full(), request, source, 4, sources)
    assert {unit.strategy for unit in several.units.units} == {Strategy.FULL_SHARD}
    assert any(line.startswith("full-shard is assumed") for line in several.how)
    for strategy in (Strategy.FULL_SHARD, Strategy.NO_SHARD):
        found = target_units(full(), replace(request, strategy=strategy), source, 4, sources).units
        assert {unit.strategy for unit in found.units} == {strategy}


def test_what_fsdp_cannot_wrap_is_said_before_anything_is_written(sources: Sources) -> None:
    params = (*PARAMS[:-1], replace(PARAMS[-1], dtype=BF16))
    request = UnitsRequest(globs=("l.*",), use_orig_params=False)
    with pytest.raises(UsageError, match="cannot wrap") as caught:
        target_units(full(params), request, None, 4, sources)
    assert "one dtype" in caught.value.details[0]
    params = (*PARAMS[:-1], named("h.weight", 0, 9))
    with pytest.raises(UsageError, match="cannot wrap") as caught:
        target_units(full(params), replace(request, globs=("l.*", "h")), None, 4, sources)
    assert caught.value.details == ("unit 'h' has no elements",)
    params = (*PARAMS[:-1], named("h.scale"))
    with pytest.raises(UsageError, match="cannot wrap") as caught:
        target_units(full(params), replace(request, parameters=tuple(p.name for p in params)), None, 4, sources)
    assert caught.value.details[0].startswith("h.scale has no dimensions")
    torch_2_4 = ResolvedUnits(units_of(params=params), None, ())
    assert target_units(full(params), UnitsRequest(), torch_2_4, 4, sources).units.units[0].params[-1].shape == ()


def test_sorted_names_make_no_flattened_target(tmp_path: Path, sources: Sources) -> None:
    source = full(sorted(PARAMS, key=lambda one: one.name))
    request = UnitsRequest(globs=("l.*",), use_orig_params=False)
    with pytest.raises(NeedsInformationError, match="order"):
        target_units(source, request, None, 4, sources)
    found = target_units(source, replace(request, reference=saved_model(tmp_path)), None, 4, sources)
    assert found.units.units == units_of().units


def test_find_units_says_how_each_was_proved(sources: Sources) -> None:
    found = find_units(raw(beside=units_of()), UnitsRequest(), sources)
    assert any("number of elements on every rank" in line for line in found.how)


def test_a_units_file_and_its_name_are_on_the_disk_before_it_is_said_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []  # for each call whether it was for a directory
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (fsync(fd), synced.append(stat.S_ISDIR(os.fstat(fd).st_mode))))
    target = tmp_path / "new" / "units.json"
    for units in (units_of(), units_of(orig=True)):
        assert write_units(units, str(target)) == target.read_bytes()
    assert synced == [False, True] * 2
    assert [entry.name for entry in target.parent.iterdir()] == ["units.json"]
    with pytest.raises(TargetUnwritableError):
        write_units(units_of(), str(target / "below"))


@pytest.mark.parametrize("name", ["_flat_param", "l.0._flat_param"])
def test_a_parameter_with_the_name_of_a_flat_parameter_is_refused_by_name(name: str, sources: Sources) -> None:
    found = checkpoint(1, model=ModelState({name: whole(6, 3), "h.weight": whole(5, 9, offset=72)}))
    with pytest.raises(SourceUnsupportedError, match="has the name of an FSDP1 flat parameter") as refused:
        source_units(found, UnitsRequest(), sources)
    assert (refused.value.key, refused.value.found) == (name, "shape [6, 3]")
