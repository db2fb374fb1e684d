"""Where the units of a source and of a target come from, and what is refused."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fsdpckpt.errors import (
    SourceCorruptError,
    SourceMissingError,
    SourceUnsupportedError,
    TargetUnwritableError,
)
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.flat.units.request import ResolvedUnits, UnitsRequest, write_units
from fsdpckpt.flat.units.source import find_units, source_units
from fsdpckpt.flat.units.target import target_units
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, ModelState
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import RankOrder, Strategy, Units
from fsdpckpt.ir.units_json import encode
from fsdpckpt.storage.sources import Sources
from tests.flat.flat_synthetic import checkpoint, local_model, named, optimizer, sharded_model, whole
from tests.ir.checkpoints import with_origin
from tests.ir.relisted import relisted
from tests.refusals import Refused

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


NAMES = tuple(param.name for param in PARAMS)
UNITS, ORIG = units_of(), units_of(orig=True)
UNWRAPPED = units_of_lists((), NAMES, use_orig_params=True, unmanaged=PARAMS)
TURNED = [replace(one, shape=one.shape[::-1]) if one.name == "l.0.a.weight" else one for one in PARAMS[:-1]]
OTHER_HEAD = [*PARAMS[:-1], named("h.weight", 6, 9)]
FROZEN = checkpoint(
    4,
    optim=optimizer(
        UNITS, 4, groups=[("_flat_param", "l.1._flat_param")],
        param_names=[["_fsdp_wrapped_module._flat_param",
                      "_fsdp_wrapped_module.l.1._fsdp_wrapped_module._flat_param"]],
    ),
)  # fmt: skip


@dataclass(frozen=True)
class SourceRow:
    """``held``: flat shards, with or without units beside them. ``found``: their units, or how they are refused.

    ``file``: the content of ``--units``; ``reference``: the parameters of a model in a torch file, or in safetensors if
    ``sorted_names``; ``request``: the other options; ``how``: words of how the units were found.
    """

    found: Units | Refused
    held: Checkpoint
    file: Units | None = None
    reference: Sequence[Parameter] = ()
    request: Mapping[str, Any] = field(default_factory=dict)
    sorted_names: bool = False
    target_flattened: bool = False
    how: str = ""


def asked(row: SourceRow | TargetRow, folder: Path) -> UnitsRequest:
    request = UnitsRequest(**row.request)
    if row.file is not None:
        request = replace(request, file=saved(folder, row.file))
    if row.reference:
        suffix = ".safetensors" if row.sorted_names else ".pt"
        request = replace(request, reference=saved_model(folder, row.reference, suffix=suffix))
    return request


LAYERS_GLOB = {"globs": ("l.*",)}
BESIDE = raw(beside=UNITS)

# fmt: off
SOURCES: dict[str, SourceRow] = {
    "units beside the source": SourceRow(UNITS, BESIDE, how="units: from run/step-7/units.json"),
    "a given file goes before the one beside": SourceRow(
        Refused(3, "not those of"), BESIDE, units_of(prefixes=("", "l.0"))),
    "for a flattened target those beside the source are the source's": SourceRow(
        UNITS, BESIDE, units_of(prefixes=("",)), request={"use_orig_params": True}, target_flattened=True),
    "for a flattened target a given file serves a source with nothing beside it": SourceRow(
        UNITS, raw(), UNITS, target_flattened=True, how="units: from"),
    "the target's file serves the source under the settings that it proves": SourceRow(
        UNITS, raw(), ORIG, request={"use_orig_params": True}, target_flattened=True),
    "and for any other target it does not": SourceRow(
        Refused(3, "not those of"), raw(), ORIG, request={"use_orig_params": True}),
    "several files beside the source": SourceRow(
        Refused(4, "several different units files", ["a/units.json", "b/units.json"]),
        with_origin(raw(), units_from="a/units.json, b/units.json")),
    "a file of a model without units has its names": SourceRow(UNITS, raw(), UNWRAPPED, request=LAYERS_GLOB),
    "and so has one beside the source": SourceRow(UNITS, raw(beside=UNWRAPPED), request=LAYERS_GLOB),
    "units recorded on another number of ranks": SourceRow(
        Refused(3, ["not those of", "8 ranks"]), raw(4, beside=replace(UNITS, world_size=8))),
    "a reference that contradicts the file": SourceRow(
        Refused(3, ["h.weight is in the units, not in", "l.0.a.weight: [28, 9] in the units, [9, 28] in"]),
        BESIDE, reference=TURNED),
    "parameters in another order than the file's": SourceRow(
        Refused(3, "--parameters"), BESIDE, request={"parameters": NAMES[::-1]}),
    "settings that contradict proved units": SourceRow(
        Refused(2, ["that is not how", "drop --use-orig-params and --param-dtype bfloat16"]), BESIDE,
        request={"use_orig_params": True, "param_dtype": BF16}),
    "a setting that makes no difference": SourceRow(
        Settings(param_dtype=BF16).applied_to(UNITS), BESIDE, request={"param_dtype": BF16}),
    "globs that agree with the file": SourceRow(UNITS, BESIDE, request=LAYERS_GLOB),
    "globs that contradict the file": SourceRow(
        Refused(3, "contradicts the units of run/step-7", [
            "l.1.a.weight is in unit 'l.1' according to the units, in the root unit according to --unit"]),
        BESIDE, request={"globs": ("l.0",)}),
    "a reference and globs": SourceRow(UNITS, raw(), reference=PARAMS, request=LAYERS_GLOB, how="--unit 'l.*'"),
    "a reference and globs, of original parameters": SourceRow(
        ORIG, raw(orig=True), reference=PARAMS, request=LAYERS_GLOB, how="--unit 'l.*'"),
    "a reference of another model": SourceRow(
        Refused(4, ["cannot be inferred", "elements"]), raw(), reference=OTHER_HEAD, request=LAYERS_GLOB),
    "a sorted reference": SourceRow(
        Refused(4, "order"), raw(), reference=PARAMS, sorted_names=True, request=LAYERS_GLOB),
    "a sorted reference, and the order": SourceRow(
        UNITS, raw(), reference=PARAMS, sorted_names=True, request={**LAYERS_GLOB, "parameters": NAMES}),
    "no names, so what slices show is said": SourceRow(
        Refused(4, ["2 optimizer keys with slices of 70 elements on every rank", "--units"]), raw()),
    "a wrapping that nothing shows": SourceRow(
        Refused(4, ["which modules", "for example --unit 'l.*'"]), raw(), reference=PARAMS),
    "DTensor model files beside flat shards, as verl writes": SourceRow(  # where plain tensors are buffers
        UNITS, checkpoint(4, model=sharded_model((*PARAMS, named("position", 64, sharded=False))),
                          optim=optimizer(UNITS, 4)), request=LAYERS_GLOB),
    "flat parameters in the model name the units": SourceRow(
        UNITS, checkpoint(4, model=local_model(UNITS, 4), optim=optimizer(UNITS, 4)), reference=PARAMS),
    "globs that are not the units which the model names": SourceRow(
        Refused(2, details=["l.1 is a unit according to the flat parameters' keys, and no --unit matches it"]),
        checkpoint(4, model=local_model(UNITS, 4)), reference=PARAMS, request={"globs": ("l.0",)}),
    "a frozen unit that param_names do not show": SourceRow(
        Refused(4, "cannot be inferred"), FROZEN, reference=PARAMS),
    "a frozen unit that a glob names": SourceRow(UNITS, FROZEN, reference=PARAMS, request=LAYERS_GLOB),
    "an optimizer by name beside flat parameters, as accelerate writes LOCAL_STATE_DICT": SourceRow(
        UNITS, checkpoint(4, model=local_model(UNITS, 4), optim=by_name())),
    "slices by name give the order that a sorted reference lacks": SourceRow(
        ORIG, checkpoint(4, model=local_model(ORIG, 4, by_name=True)), reference=PARAMS, sorted_names=True),
    "a glob that matches nothing": SourceRow(
        Refused(2, "--unit 'l.*' for every layer", ["e", "l", "l.{0..1}", "l.{0..1}.a", "h"]), raw(),
        reference=PARAMS, request={"globs": ("layers.*",)}),
}
# fmt: on


@pytest.mark.parametrize("name", SOURCES)
def test_the_units_of_a_source(name: str, tmp_path: Path, sources: Sources) -> None:
    row = SOURCES[name]
    request = asked(row, tmp_path)

    def found() -> ResolvedUnits:
        return source_units(row.held, request, sources, **({"target_flattened": True} if row.target_flattened else {}))

    if isinstance(row.found, Refused):
        row.found.by(found)
        return
    units = found()
    assert (units.units.units, units.units.use_orig_params) == (row.found.units, row.found.use_orig_params)
    assert row.how in units.how[0]
    if row.how.startswith("units: from"):
        assert any("number of elements on every rank" in line for line in find_units(row.held, request, sources).how)


@dataclass(frozen=True)
class TargetRow:
    """``held``: whole tensors, ``source``: the units that they had. ``found``: what the target's units have, by field,
    or how it is refused; ``how``, ``quiet``: words that are said of it, and that are not. The rest as in ``SourceRow``.
    """

    found: Mapping[str, Any] | Refused
    held: Checkpoint = field(default_factory=full)
    source: Units | None = None
    request: Mapping[str, Any] = field(default_factory=dict)
    file: Units | None = None
    reference: Sequence[Parameter] = ()
    sorted_names: bool = False
    world_size: int = 4
    open_settings: tuple[str, ...] = ()
    how: str = ""
    quiet: str = ""


AS_FLAT = {"globs": ("l.*",), "use_orig_params": False}
AS_ORIG = {"globs": ("l.*",), "use_orig_params": True}
MAY_BE_BUFFER = full((named("position", 64, sharded=None), *PARAMS), by_name())
SORTED = full(sorted(PARAMS, key=lambda one: one.name))
LAST = full((*PARAMS, named("position", 64)), by_name())
HALF_HEAD = (*PARAMS[:-1], replace(PARAMS[-1], dtype=BF16))
SCALAR_HEAD = (*PARAMS[:-1], named("h.scale"))
APART = (named("a.x.w", 6, 7), named("b.w", 5), named("a.y.w", 3))
SAME = (named("a.weight", 6, 7), named("b.weight", 6, 7))
TIED = full((*PARAMS[:-1], named("h.weight", 17, 9)), by_name(PARAMS[:-1]))
BIASES = [[name for name in NAMES if ("bias" in name) is bias] for bias in (False, True)]
IN_GROUPS = full(optim=by_name(groups=(NAMES[:2], NAMES[2:])))
PARTLY = full(optim=Optimizer.of({}, by_name(groups=[NAMES[:-1]]).param_groups))
HYBRID = replace(Settings(strategy=Strategy.HYBRID_SHARD).applied_to(UNITS), world_size=4)
ONE_RANK = replace(Settings(strategy=Strategy.NO_SHARD).applied_to(UNITS), world_size=1)
OTHER_MODEL = units_of(params=[
    replace(PARAMS[0], shape=(9, 17)), replace(PARAMS[1], name="l.0.b.weight"),
    *(replace(one, dtype=BF16) if one.name.startswith("l.1") else one for one in PARAMS[2:]),
])  # fmt: skip


def with_tie() -> Checkpoint:
    params = sharded_model(PARAMS).params
    return replace(full(), model=ModelState({**params, "out.weight": params["e.weight"]}))


def with_states_of_the_other_name() -> Checkpoint:
    tied = with_tie()
    assert tied.optim is not None
    state = {"out.weight" if name == "e.weight" else name: entry for name, entry in tied.optim.state.items()}
    return replace(tied, optim=Optimizer.of(state, [{"lr": 0.1, "params": list(state)}]))


def assumed(strategy: Strategy) -> dict[str, Any]:
    return {"units": tuple(replace(unit, strategy=strategy) for unit in ONE_RANK.units)}


# fmt: off
TARGETS: dict[str, TargetRow] = {
    # Wrapping and settings
    "those of the source": TargetRow(
        {"units": ORIG.units, "world_size": 3, "groups": (NAMES,)}, source=ORIG, world_size=3,
        how="target units: use_orig_params=True, full-shard, aligned for float32", quiet="--param-dtype"),
    "other settings, which the groups follow": TargetRow(
        {"groups": (("_flat_param", "l.0._flat_param", "l.1._flat_param"),), "shard_size": 2,
         "units": Settings(False, Strategy.HYBRID_SHARD, BF16, 2).applied_to(ORIG).units},
        source=ORIG.with_groups((NAMES,)),
        request={"use_orig_params": False, "strategy": Strategy.HYBRID_SHARD, "shard_size": 2, "param_dtype": BF16}),
    "another wrapping": TargetRow(
        {"units": build_units(PARAMS, ("",), Settings(use_orig_params=False)).units}, source=UNITS,
        request={"globs": ("none",)}),
    "no wrapping": TargetRow(Refused(4, ["which modules", "for example --unit 'l.*'"])),
    "no use_orig_params": TargetRow(Refused(4, ["use_orig_params", "--no-use-orig-params"]), request=LAYERS_GLOB),
    "both": TargetRow({"units": ORIG.units}, request=AS_ORIG),
    "a setting that the source did not show": TargetRow(
        Refused(4, "use_orig_params"), source=UNITS, open_settings=("use_orig_params",)),
    "a setting that the source did not show, given": TargetRow(
        {"units": UNITS.units}, source=UNITS, open_settings=("use_orig_params",), request={"use_orig_params": False}),
    "an alignment that nothing proves": TargetRow(
        {}, source=UNITS, request={"use_orig_params": True}, how="--param-dtype"),
    "an alignment that is given": TargetRow(
        {}, source=UNITS, request={"use_orig_params": True, "param_dtype": BF16}, how="aligned for bfloat16",
        quiet="--param-dtype"),

    # Units of another model
    "other names, shapes and dtypes": TargetRow(
        Refused(3, ["do not describe", "e.weight: [9, 17] in the units, [17, 9] in the model",
                    "l.0.b.weight is in the units", "parameter l.0.a.weight", "l.1.a.bias: bfloat16"]),
        file=OTHER_MODEL),
    "another order than the model's": TargetRow(
        Refused(3, "do not describe"), full(SAME),
        file=build_units(SAME[::-1], ("",), Settings(use_orig_params=False))),
    "other shapes than those of the states": TargetRow(
        Refused(3, details=["e.weight: [9, 17] in the units, its optimizer states are [17, 9]"]),
        replace(full(), model=None), units_of(params=[replace(PARAMS[0], shape=(9, 17)), *PARAMS[1:]])),
    "globs that contradict the file": TargetRow(Refused(3, "contradicts"), file=UNITS, request={"globs": ("l.0",)}),

    # Which names, and in which order
    "sorted names": TargetRow(Refused(4, "order"), SORTED, request=AS_FLAT),
    "sorted names and a reference": TargetRow({"units": UNITS.units}, SORTED, request=AS_FLAT, reference=PARAMS),
    "names in an order that no module has, as of a dict that a script made": TargetRow(
        Refused(4, ["the model section does not keep it", "--parameters FILE"]), LAST, request=AS_ORIG),
    "and their order": TargetRow(
        {"parameters": ("position", *NAMES)}, LAST, request={**AS_ORIG, "parameters": ("position", *NAMES)}),
    "what may be a buffer": TargetRow(
        Refused(4, details=["position may be a parameter or a buffer"]), MAY_BE_BUFFER, request=AS_FLAT),
    "what a list does not have is a buffer": TargetRow(
        {"parameters": NAMES}, MAY_BE_BUFFER, request={**AS_FLAT, "parameters": NAMES}),
    "what is said to be a buffer": TargetRow(
        {"parameters": NAMES}, MAY_BE_BUFFER, request={**AS_ORIG, "buffers": ("pos*",)}),
    "what is said to be none, and without state is frozen": TargetRow(
        {"parameters": ("position", *NAMES), "frozen": ["position"]}, MAY_BE_BUFFER,
        request={**AS_ORIG, "buffers": ("none",)}),
    "a glob of buffers that matches nothing": TargetRow(
        Refused(2, ["mask", "matches no name"]), MAY_BE_BUFFER, request={**AS_ORIG, "buffers": ("pos*", "mask")}),
    "a list that lacks some with states": TargetRow(
        Refused(3, "does not list 2 of", NAMES[-2:]), request={**AS_FLAT, "parameters": NAMES[:-2]}),
    "a list in neither the model's order nor the optimizer's": TargetRow(
        Refused(3, ["do not describe", "--parameters"]), IN_GROUPS, request={**AS_ORIG, "parameters": NAMES[::-1]}),
    "a list in the optimizer's order": TargetRow(
        {"parameters": NAMES, "groups": (NAMES[1::-1], NAMES[2:])}, IN_GROUPS,
        request={**AS_ORIG, "parameters": (*NAMES[1::-1], *NAMES[2:])}),
    "a parameter without state that may be a second name": TargetRow(
        Refused(4, "frozen, or shared with e.weight"), TIED, request=AS_FLAT),
    "a second name of the same bytes": TargetRow(
        {"shared": (("out.weight", "e.weight"),)}, with_tie(), request=AS_FLAT),

    "states under the second name": TargetRow(
        {"parameters": NAMES, "groups": (NAMES,)}, with_states_of_the_other_name(),
        file=relisted(ORIG, shared=(("out.weight", "e.weight"),))),
    "a list that goes back to a module, where nothing says the model's order": TargetRow(
        Refused(4, ["no model lists them like --parameters", "--reference PATH"]), SORTED,
        request={**AS_ORIG, "parameters": (*NAMES[:2], NAMES[3], NAMES[2], *NAMES[4:])}),
    "and a file that lists them so": TargetRow(
        Refused(4, "no model lists them like the units of", silent=["like --parameters"]), SORTED,
        file=relisted(ORIG, parameters=(*NAMES[:2], NAMES[3], NAMES[2], *NAMES[4:]))),
    "where each flat parameter has one, and no optimizer has ids, no order matters": TargetRow(
        {"parameters": tuple(one.name for one in APART)}, replace(full(APART), optim=None),
        request={"globs": ("a.x", "a.y", "b"), "use_orig_params": True,
                 "parameters": tuple(one.name for one in APART)}),
    "a file of a model without units has its names": TargetRow(
        {"units": ORIG.units}, file=UNWRAPPED, request=AS_ORIG, how="given.json, wrapping from"),
    "and its groups": TargetRow(
        {"groups": (NAMES[::-1],)}, file=UNWRAPPED.with_groups((NAMES[::-1],)), request=AS_ORIG),
    "and its groups of flat parameters": TargetRow(
        {"groups": (("_flat_param", "l.0._flat_param", "l.1._flat_param"),)},
        file=UNWRAPPED.with_groups((NAMES[::-1],)), request=AS_FLAT),

    # Groups
    "groups, so that ids can be read again": TargetRow(
        {"groups": tuple(map(tuple, BIASES))}, full(optim=by_name(groups=BIASES)), ORIG),
    "a flat parameter in two groups": TargetRow(
        Refused(3, ["divided", "in group 0; ", "--use-orig-params"]),
        full(optim=by_name(groups=[NAMES[::2], NAMES[1::2]])), request=AS_FLAT),
    "a flat parameter partly in no group": TargetRow(
        Refused(3, ["divided", f"{NAMES[-1]} in no group"]), PARTLY, UNITS),
    "an original parameter in no group": TargetRow({"groups": (NAMES[:-1],)}, PARTLY, ORIG),

    "optimizers in orders of the ranks that saved": TargetRow(
        Refused(4, ["in different orders", "the orders of the 4 ranks"]), world_size=4,
        source=relisted(ORIG, groups=(NAMES,), orders=(RankOrder((1,), (NAMES[::-1],)),), world_size=2)),

    # Sharding groups and strategies
    "hybrid-shard without a size": TargetRow(
        Refused(4, "--shard-size"), source=UNITS, request={"strategy": Strategy.HYBRID_SHARD}),
    "a size that does not divide the ranks": TargetRow(
        Refused(2, ["divide", "--shard-size 2 or --shard-size 3 or --shard-size 6"], silent=["--shard-size 1"]),
        source=UNITS, world_size=6, request={"strategy": Strategy.HYBRID_SHARD, "shard_size": 4}),
    "a size without hybrid-shard": TargetRow(Refused(2, "hybrid"), source=UNITS, request={"shard_size": 2}),
    "one sharding group, on as many ranks": TargetRow({"shard_size": None, "world_size": 4}, source=HYBRID),
    "one sharding group does not show those of more ranks": TargetRow(
        Refused(4, "record one group of 4 ranks, not how others"), source=HYBRID, world_size=8),
    "one sharding group, and a size": TargetRow(
        {"shard_size": 4}, source=HYBRID, world_size=8, request={"shard_size": 4}),
    "no sharding group": TargetRow(
        Refused(4, "the size of a group is not recorded"), source=replace(UNITS, world_size=4), world_size=8,
        request={"strategy": Strategy.HYBRID_SHARD}),
    # FSDP1 turns every strategy into NO_SHARD on one rank (``_init_core_state``)
    "one rank": TargetRow({"world_size": 1}, source=ONE_RANK, world_size=1),
    "one rank does not show the strategy of several": TargetRow(
        assumed(Strategy.FULL_SHARD), source=ONE_RANK, how="full-shard is assumed"),
    "one rank does not show it for another wrapping either": TargetRow(
        assumed(Strategy.FULL_SHARD), source=ONE_RANK, request=LAYERS_GLOB, how="full-shard is assumed"),
    **{f"one rank, and {strategy}": TargetRow(
        assumed(strategy), source=ONE_RANK, request={"strategy": strategy}, quiet="is assumed")
        for strategy in (Strategy.FULL_SHARD, Strategy.NO_SHARD)},

    # What FSDP1 cannot wrap
    "two dtypes": TargetRow(Refused(2, ["cannot wrap", "one dtype"]), full(HALF_HEAD), request=AS_FLAT),
    "no elements": TargetRow(
        Refused(2, "cannot wrap", ["unit 'h' has no elements"]), full((*PARAMS[:-1], named("h.weight", 0, 9))),
        request={**AS_FLAT, "globs": ("l.*", "h")}),
    "no dimensions": TargetRow(
        Refused(2, ["cannot wrap", "h.scale has no dimensions"]), full(SCALAR_HEAD),
        request={**AS_FLAT, "parameters": tuple(one.name for one in SCALAR_HEAD)}),
    "no dimensions, in a job of torch 2.4": TargetRow({}, full(SCALAR_HEAD), units_of(params=SCALAR_HEAD)),
}
# fmt: on


@pytest.mark.parametrize("name", TARGETS)
def test_the_units_of_a_target(name: str, tmp_path: Path, sources: Sources) -> None:
    row = TARGETS[name]
    source = None if row.source is None else ResolvedUnits(row.source, None, (), open_settings=row.open_settings)

    def found() -> ResolvedUnits:
        return target_units(row.held, asked(row, tmp_path), source, row.world_size, sources)

    if isinstance(row.found, Refused):
        row.found.by(found)
        return
    units = found()
    expected = dict(row.found)
    frozen = [name for name, param in units.units.params().items() if not param.requires_grad]
    assert frozen == expected.pop("frozen", [])
    assert {field: getattr(units.units, field) for field in expected} == expected
    assert any(row.how in line for line in units.how)
    assert not row.quiet or not any(row.quiet in line for line in units.how)


def test_units_of_whole_tensors_are_found_for_any_number_of_ranks(sources: Sources) -> None:
    found = find_units(full(), UnitsRequest(**AS_FLAT), sources)
    assert (found.units.units, found.units.world_size) == (UNITS.units, None)
    assert found.how[0].startswith("units: ")


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


def test_a_reference_without_names_is_refused_by_its_path(tmp_path: Path, sources: Sources) -> None:
    path = tmp_path / "ids.pt"
    torch.save({"state": {0: {"exp_avg": torch.rand(3)}}, "param_groups": [{"params": [0]}]}, path)
    request = UnitsRequest(reference=str(path), **AS_ORIG)
    for find in (lambda: source_units(raw(), request, sources), lambda: target_units(raw(), request, None, 4, sources)):
        error = Refused(3, ["has no names and shapes, so it cannot be a reference", "--reference PATH"]).by(find)
        assert error.file == str(path)


def test_an_order_that_is_known_only_within_each_unit_is_none_for_a_units_file_and_a_target(sources: Sources) -> None:
    held = checkpoint(4, model=local_model(UNITS, 4), optim=by_name())
    found = source_units(held, UnitsRequest(), sources)
    assert found.units.units == UNITS.units and not found.order_known
    for ask in (
        lambda: find_units(held, UnitsRequest(), sources),
        lambda: target_units(full(), UnitsRequest(), found, 4, sources),
    ):
        Refused(4, ["shows only the order within each unit", "--parameters FILE", "--reference PATH"]).by(ask)


def test_units_beside_the_source_that_cannot_be_read_are_not_replaced_by_others(sources: Sources) -> None:
    source = raw()
    refused = ("run/units.json: cut: these units are not used",)
    source.origin = replace(source.origin, units_refused=refused)
    with pytest.raises(SourceCorruptError) as caught:
        source_units(source, UnitsRequest(), sources)
    assert caught.value.details == refused


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
