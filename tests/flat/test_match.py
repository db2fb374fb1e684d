"""Units against a flattened checkpoint: what is proved, and what is said of everything that does not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from fsdpckpt.flat.match import FlatMatch, Mismatch, match
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.placements import OneSlice
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.units import Strategy, Units
from fsdpckpt.ir.values import Value
from tests.flat.flat_synthetic import (
    FLOAT,
    checkpoint,
    local_model,
    named,
    optimizer,
    replicas,
    sharded_model,
    whole,
)
from tests.flat.flat_synthetic import slices as cut

PARAMS = (named("e.weight", 4, 3), named("e.bias", 3), named("l.weight", 5, 2), named("l.bias", 6))
NAMES = tuple(param.name for param in PARAMS)
RANKS = 4


def units(*, orig: bool = False, without: tuple[str, ...] = (), strategy: Strategy = Strategy.FULL_SHARD) -> Units:
    """Two flat parameters: 15 elements and, without ``without``, 16."""
    return build_units(PARAMS, ("", "l"), Settings(orig, strategy), unmanaged=without)


def flat_model(by: Units, *, by_name: bool = False, **changed: Tensor | Value) -> dict[str, Tensor | Value]:
    """A model as ``LOCAL_STATE_DICT`` has it; ``changed``: with dots as two underscores."""
    params = dict(local_model(by, RANKS, by_name=by_name).params)
    return {**params, **{key.replace("__", "."): leaf for key, leaf in changed.items()}}


def renamed(params: Mapping[str, Tensor | Value], old: str, new: str) -> dict[str, Tensor | Value]:
    return {key.replace(old, new): leaf for key, leaf in params.items()}


def raw(held: Units, **changed: object) -> Optimizer:
    return optimizer(held, RANKS, **changed)  # type: ignore[arg-type]


def with_states(optim: Optimizer, key: int | str, **states: Tensor | Value) -> Optimizer:
    return Optimizer.of({**optim.state, key: dict(states)}, optim.param_groups)


@dataclass(frozen=True)
class Case:
    """A checkpoint held against ``units``: everything in which it contradicts them, or what is ``proved`` of it, if the
    row says that.
    """

    units: Units
    says: Sequence[str] = ()
    model: Mapping[str, Tensor | Value] | ModelState | None = None
    optim: Optimizer | None = None
    proved: Sequence[str] | None = None
    groups: object = None
    keys: Mapping[ParamKey, str] | None = None
    kept_order: bool = True
    world_size: int = RANKS

    def checkpoint(self) -> Checkpoint:
        model = self.model if self.model is None or isinstance(self.model, ModelState) else ModelState(dict(self.model))
        held = checkpoint(self.world_size, model=model, optim=self.optim)
        return held if self.kept_order else held.without_order()


FLAT, ORIG = units(), units(orig=True)
NONE, ORIG_NONE = units(strategy=Strategy.NO_SHARD), units(orig=True, strategy=Strategy.NO_SHARD)
OUTSIDE = units(without=("l.weight", "l.bias"))
KEYS = ("_flat_param", "l._flat_param")
KEYED = ORIG.with_groups((NAMES,))
NO_FLAT = "the checkpoint has no flat parameter l._flat_param"
SLICES = raw(FLAT).state[0]["exp_avg"]
PROVED_STATES = "states have the units' number of elements on every rank"

FEW = build_units((named("w", 3),), ("",), Settings(use_orig_params=False))
FEW_ROWS = Chunks.rows(
    ndim=1, rank=[0, 1, 2, 3], file=[0, 1, 2, 3], offset=[0] * 4,
    start=[[0], [1], [2], [0]], size=[[1], [1], [1], [0]],
)  # fmt: skip

SAME = tuple(named(f"{layer}.w", 4, 2) for layer in "abc")  # three units that are alike
IN_ORDER, OTHER_ORDER = (
    build_units(each, "abc", Settings(use_orig_params=True)) for each in (SAME, [SAME[0], SAME[2], SAME[1]])
)

BESIDE = {"l.weight": whole(5, 2, sharded=False), "l.bias": cut([6] * RANKS)}
AT = {name: list(OUTSIDE.optimizer_keys()).index(name) for name in BESIDE}

WHOLE_STATES: dict[ParamKey, dict[str, Tensor | Value]] = {
    name: {"step": whole(), "exp_avg": whole(*param.shape)} for name, param in FLAT.params().items()
}
WHOLE = Optimizer.of({**WHOLE_STATES, "user": {"x": whole(9, 9)}}, [{"params": list(NAMES)}])

FROZEN = build_units(
    [*PARAMS[:2], *(replace(one, requires_grad=False) for one in PARAMS[2:])],
    ("", "l"),
    Settings(use_orig_params=False),
)
FROZEN_ORIG = build_units(
    [*PARAMS[:3], replace(PARAMS[3], requires_grad=False)], ("", "l"), Settings(use_orig_params=True)
)
NUMBER_NAMED = (named("w", 2, 4), named("0", 1, 5))
ONE_RANK = build_units(NUMBER_NAMED, ("",), Settings(use_orig_params=True, strategy=Strategy.NO_SHARD))
NUMBER_STATES = [{"exp_avg": replicas(1, *param.shape)} for param in NUMBER_NAMED]
NUMBER_MODEL = {param.name: replicas(1, *param.shape) for param in NUMBER_NAMED}
BY_TWO = (("l.weight", "e.bias"), ("e.weight", "l.bias"))
BY_NAME = raw(ORIG, by="name")
WRAPPED_NAMES = [f"_fsdp_wrapped_module.{name}" for name in NAMES]

# fmt: off
CASES: dict[str, Case] = {
    "units recorded on the same ranks": Case(replace(FLAT, world_size=RANKS), model=flat_model(FLAT)),
    "units recorded on other ranks": Case(
        replace(FLAT, world_size=6), ["the units were recorded on 6 ranks, the checkpoint has 4"], flat_model(FLAT)),
    "sharding groups that do not divide the ranks": Case(
        replace(FLAT, shard_size=3), ["sharding groups of 3 ranks do not divide 4 ranks"], flat_model(FLAT)),

    # Flat parameters
    "keys with a wrapper": Case(
        FLAT, model=renamed(flat_model(FLAT), "_flat_param", "_fsdp_wrapped_module._flat_param"),
        proved=["units check out: 2 of 2 flat parameters match in name and length"]),
    "a flat parameter that is gone": Case(FLAT, [NO_FLAT], flat_model(FLAT, l___flat_param=None)),
    "a flat parameter of no unit": Case(
        FLAT, ["the checkpoint has a flat parameter x._flat_param, the units have no such unit", NO_FLAT],
        renamed(flat_model(FLAT), "l._flat_param", "x._flat_param")),
    "another length": Case(
        FLAT, ["l._flat_param: 16 elements in the units, 15 in the checkpoint"],
        flat_model(FLAT, l___flat_param=whole(15))),
    "another form": Case(
        FLAT, ["l._flat_param: 16 elements in the units, [4, 4] in the checkpoint"],
        flat_model(FLAT, l___flat_param=whole(4, 4))),
    "slices that begin elsewhere": Case(
        replace(FLAT, shard_size=2),
        [f"{key}: rank {rank} holds {held}, the units have {own}" for key, rows in (
            ("_flat_param", ("0:4 0:8", "4:8 8:15", "8:12 0:8", "12:15 8:15")),
            ("l._flat_param", ("0:4 0:8", "4:8 8:16", "8:12 0:8", "12:16 8:16")),
        ) for rank, (held, own) in enumerate(map(str.split, rows))],
        flat_model(FLAT)),
    "replicas": Case(NONE, model=flat_model(NONE)),
    "a rank without elements": Case(FEW, model={"_flat_param": Tensor(FLOAT, (3,), FEW_ROWS, sharded=True)}),
    "another order, which ids count in": Case(
        OTHER_ORDER, ["the order of units differs: c in the units, b in the model section"],
        local_model(IN_ORDER, RANKS), raw(IN_ORDER)),
    "another order, and no ids": Case(OTHER_ORDER, model=local_model(IN_ORDER, RANKS)),
    "another order, and names": Case(OTHER_ORDER, model=local_model(IN_ORDER, RANKS), optim=raw(IN_ORDER, by="name")),
    "another order than one that was not kept": Case(
        OTHER_ORDER, model=local_model(IN_ORDER, RANKS), optim=raw(IN_ORDER), kept_order=False),

    # Names beside flat parameters, or instead of them
    "slices by name": Case(ORIG, model=flat_model(ORIG, by_name=True)),
    "a slice by name of another length": Case(
        ORIG, ["model l.bias: 0, 0, 3, 3 elements by rank in the units, found 0, 0, 5, 1"],
        flat_model(ORIG, by_name=True, l__bias=cut([0, 0, 5, 1]))),
    "values and buffers among them": Case(
        ORIG, model={"note": None, "mean": cut([2] * RANKS), "count": whole(sharded=False),
                     **flat_model(ORIG, by_name=True), "e.bias": "no tensor"}),
    "a parameter that the units lack beside flat ones": Case(
        FLAT, ["the model has a parameter x, which the units do not have"], flat_model(FLAT, x=whole(3, offset=999))),
    "a parameter that the units lack beside whole ones": Case(
        FLAT, ["the model has a parameter x, which the units do not have"],
        {**sharded_model(PARAMS).params, "x": whole(3, offset=999)}),
    "a buffer beside flat ones": Case(FLAT, model=flat_model(FLAT, x=whole(3, offset=999, sharded=False))),
    "names of a sharded model": Case(
        FLAT, model=sharded_model(PARAMS), proved=["4 names and shapes of the units are those of the model section"]),
    "names of a sharded model with a wrapper": Case(
        FLAT, model={f"_orig_mod.{key}": leaf for key, leaf in sharded_model(PARAMS).params.items()}),
    "a parameter that the model lacks": Case(
        FLAT, ["l.bias is in the units, not in the model section"], sharded_model(PARAMS[:3])),
    "a parameter of another shape": Case(
        FLAT, ["e.weight: [4, 3] in the units, [3, 4] in the model section"],
        {**sharded_model(PARAMS).params, "e.weight": whole(3, 4, offset=999)}),
    "parameters beside the units": Case(OUTSIDE, model={**flat_model(OUTSIDE), **BESIDE}),
    "parameters beside the units in other shapes": Case(
        OUTSIDE, ["l.weight: [5, 2] in the units, [2, 5] in the model section",
                  "l.bias: [6] in the units, [23] in the model section"],
        {**flat_model(OUTSIDE), "l.weight": whole(2, 5, sharded=False), "l.bias": cut([6, 6, 6, 5])}),

    # The states of the optimizer
    "slices of ids": Case(FLAT, optim=raw(FLAT), proved=[f"4 optimizer {PROVED_STATES}"]),
    "no states at all": Case(FLAT, optim=Optimizer.of({}, [{"params": [0, 1]}]), proved=[]),
    "an id that no group lists": Case(
        FLAT, ["optim 9: no param group lists it"], optim=with_states(raw(FLAT), 9, step=whole())),
    "an entry of the user": Case(ORIG, optim=with_states(BY_NAME, "user", table=whole(3))),
    "ids without groups": Case(FLAT, optim=Optimizer.of(raw(FLAT).state, None)),
    "ids without groups in the order of recorded ones": Case(
        FLAT.with_groups((KEYS[::-1],)), optim=Optimizer.of(raw(FLAT).state, None),
        keys={0: "l._flat_param", 1: "_flat_param"}),
    "an id beyond the units": Case(
        FLAT, ["optim 2: the units have 2 parameters"],
        optim=Optimizer.of({**raw(FLAT).state, 2: {"step": whole()}}, None)),
    "a slice of another length": Case(
        FLAT, ["optim 0 (_flat_param) exp_avg_sq: 4 elements on every rank in the units, found 4, 4, 4, 5"],
        optim=with_states(raw(FLAT), 0, step=whole(), exp_avg=SLICES, exp_avg_sq=cut([4, 4, 4, 5]), note=None)),
    "a matrix for a slice": Case(
        FLAT.with_groups((KEYS,)),
        ["optim 0 (_flat_param) exp_avg: 4 elements on every rank in the units, found shape [4, 4]"],
        optim=with_states(raw(FLAT), 0, exp_avg=whole(4, 4))),
    "one number a rank beside a slice": Case(
        FLAT, optim=with_states(raw(FLAT), 0, count=cut([1] * RANKS), exp_avg=SLICES)),
    "one number a rank alone": Case(
        FLAT, ["optim 0 (_flat_param) count: 4 elements on every rank in the units, found 1 (each of 4)"],
        optim=with_states(raw(FLAT), 0, count=cut([1] * RANKS))),
    "two numbers a rank": Case(
        FLAT, ["optim 0 (_flat_param) count: 4 elements on every rank in the units, found 2 (each of 4)"],
        optim=with_states(raw(FLAT), 0, count=cut([2] * RANKS), exp_avg=SLICES)),
    "states of parameters beside the units": Case(OUTSIDE, optim=raw(OUTSIDE)),
    "a vector beside the units of other lengths": Case(
        OUTSIDE, [f"optim {AT['l.bias']} (l.bias) exp_avg: [6] in the units, found 6, 6, 6, 5"],
        optim=with_states(raw(OUTSIDE), AT["l.bias"], exp_avg=cut([6, 6, 6, 5]))),
    "a matrix beside the units, in slices": Case(
        OUTSIDE, [f"optim {AT['l.weight']} (l.weight) exp_avg: [5, 2] in the units, found 5 (each of 4)"],
        optim=with_states(raw(OUTSIDE), AT["l.weight"], exp_avg=cut([5] * RANKS))),
    "a matrix beside the units, of another shape": Case(
        OUTSIDE, [f"optim {AT['l.weight']} (l.weight) exp_avg: [5, 2] in the units, found shape [2, 5]"],
        optim=with_states(raw(OUTSIDE), AT["l.weight"], exp_avg=replicas(RANKS, 2, 5))),
    "a whole state where units cut": Case(
        ORIG, ["optim 0 (e.weight) exp_avg: 4, 4, 4, 0 elements by rank in the units, found shape [4, 3]"],
        optim=with_states(raw(ORIG), 0, exp_avg=replicas(RANKS, 4, 3))),
    "whole states where nothing is cut": Case(ORIG_NONE, optim=raw(ORIG_NONE)),
    "a whole state of another shape where nothing is cut": Case(
        ORIG_NONE, ["optim 0 (e.weight) exp_avg: 12 (each of 4) elements by rank in the units, found shape [3, 4]"],
        optim=with_states(raw(ORIG_NONE), 0, exp_avg=replicas(RANKS, 3, 4))),
    # 16 elements of e and l lie 4 a rank; e.bias is one slice of 3 and one of 0
    "the one slice that DCP kept, of any rank": Case(
        ORIG, optim=with_states(raw(ORIG), 0, exp_avg=replace(whole(4), cut=OneSlice()))),
    "the one slice that DCP kept, of no rank": Case(
        ORIG, ["optim 0 (e.weight) exp_avg: 4, 4, 4, 0 elements by rank in the units, found a slice of 3"],
        optim=with_states(raw(ORIG), 0, exp_avg=replace(whole(3), cut=OneSlice()))),

    # Whole states by name beside flat parameters
    "whole states": Case(
        FLAT, model=flat_model(FLAT), optim=WHOLE,
        proved=["units check out: 2 of 2 flat parameters match in name and length",
                "4 optimizer entries have the names and shapes of the units"]),
    "a whole state of another shape": Case(
        FLAT, ["optim e.weight: [4, 3] in the units, [3, 4] in the checkpoint"], flat_model(FLAT),
        with_states(WHOLE, "e.weight", exp_avg=whole(3, 4))),
    "factors": Case(FLAT, model=flat_model(FLAT), optim=with_states(WHOLE, "e.weight", row=whole(4), own=whole(4, 3))),
    "whole states by a name with a wrapper": Case(
        FLAT, model=flat_model(FLAT), keys={"_orig_mod.e.weight": "e.weight", "e.bias": "e.bias"},
        optim=Optimizer.of({"_orig_mod.e.weight": {"step": whole(), "mode": "fast", "exp_avg": whole(4, 3)},
                            "e.bias": {"step": whole()}}, None)),
    "an entry of the user alone": Case(
        FLAT, model=flat_model(FLAT), optim=Optimizer.of({"user": {"x": whole(9, 9)}}, None),
        proved=["units check out: 2 of 2 flat parameters match in name and length"]),

    # A parameter that is called "0"
    "an id": Case(
        ONE_RANK, model=NUMBER_MODEL, world_size=1,
        optim=Optimizer.of(dict(enumerate(NUMBER_STATES)), [{"params": [0, 1]}])),
    "a name that is a number": Case(
        ONE_RANK, model=NUMBER_MODEL, world_size=1,
        optim=Optimizer.of(dict(zip(("w", "0"), NUMBER_STATES, strict=True)), [{"params": ["w", "0"]}])),
    "states of the other one": Case(
        ONE_RANK, ["optim 0: [1, 5] in the units, [2, 4] in the checkpoint",
                   "optim w: [2, 4] in the units, [1, 5] in the checkpoint"],
        NUMBER_MODEL, world_size=1,
        optim=Optimizer.of(dict(zip(("0", "w"), NUMBER_STATES, strict=True)), [{"params": ["w", "0"]}])),

    # Groups and their names
    "groups that only param_names tell": Case(
        ORIG, optim=raw(ORIG, groups=BY_TWO, param_names=BY_TWO), groups=BY_TWO,
        proved=["4 param_names of the groups agree with the units", f"8 optimizer {PROVED_STATES}"]),
    "groups that the units have, too": Case(
        ORIG.with_groups(BY_TWO), optim=raw(ORIG, groups=BY_TWO, param_names=BY_TWO), groups=BY_TWO),
    "param_names of an unknown parameter": Case(
        ORIG, ["a param group lists x, which no optimizer of these units holds"],
        optim=raw(ORIG, param_names=[[*NAMES[:3], "x"]])),
    "param_names of an unknown parameter in known groups": Case(
        KEYED, ["param_names: x is not among the units' parameters"],
        optim=raw(ORIG, param_names=[[*NAMES[:3], "x"]])),
    "param_names in another order": Case(
        KEYED, ["optim 0 is e.bias in param_names, e.weight in the units",
                "optim 1 is e.weight in param_names, e.bias in the units"],
        optim=raw(ORIG, param_names=[[NAMES[1], NAMES[0], *NAMES[2:]]])),
    "param_names with wrappers": Case(ORIG, optim=raw(ORIG, param_names=[WRAPPED_NAMES]), groups=(NAMES,)),
    "param_names with wrappers in known groups": Case(KEYED, optim=raw(ORIG, param_names=[WRAPPED_NAMES])),
    "names with wrappers": Case(
        ORIG, proved=[f"8 optimizer {PROVED_STATES}"],
        optim=Optimizer.of({f"_fsdp_wrapped_module.{key}": entry for key, entry in BY_NAME.state.items()},
                           [{"params": WRAPPED_NAMES}])),
    "names where the units have flat parameters": Case(
        FLAT, [f"optim: the groups list {name}, which the units do not have" for name in NAMES], optim=BY_NAME),
    "an unknown name in a group": Case(
        ORIG, ["optim: the groups list x, which the units do not have"],
        optim=Optimizer.of(BY_NAME.state, [{"params": [*NAMES, "x"]}])),
    "fewer groups than the units": Case(
        FLAT.with_groups(((KEYS[0],), (KEYS[1],))), ["the optimizer has 1 param groups, the units have 2"],
        optim=raw(FLAT)),
    "ids of flat parameters where the units have names": Case(
        ORIG, ["param group 0 lists 2 parameters, the units have 4"], optim=raw(FLAT)),
    "ids of names where the units have flat parameters": Case(
        FLAT, ["param group 0 lists 4 parameters, the units have 2"], optim=raw(ORIG)),
    "a smaller group": Case(
        FLAT.with_groups((KEYS,)), ["param group 0 lists 1 parameter, the units have 2"],
        optim=raw(FLAT, groups=[[KEYS[0]]])),
    "groups that nothing tells": Case(
        FLAT, ["the optimizer has 2 param groups, and the units do not say which parameters are in which"],
        optim=raw(FLAT, groups=[[KEYS[0]], [KEYS[1]]])),
    "a group without parameters that nothing tells": Case(
        FLAT, ["the optimizer has 2 param groups, and the units do not say which parameters are in which"],
        optim=Optimizer.of(raw(FLAT).state, [{"params": [0, 1]}, {"lr": 0.1}])),
    "a group without parameters that the units have": Case(
        FLAT.with_groups((KEYS, ())), optim=Optimizer.of(raw(FLAT).state, [{"params": [0, 1]}, {"lr": 0.1}])),
    "a group without what is frozen": Case(FROZEN, optim=raw(FROZEN, groups=[["_flat_param"]])),
    "a group with what is frozen": Case(FROZEN, optim=raw(FROZEN)),
    "a group of names without what is frozen": Case(FROZEN_ORIG, optim=raw(FROZEN_ORIG, groups=[NAMES[:3]])),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_a_flattened_checkpoint_is_held_against_units(name: str) -> None:
    case = CASES[name]
    found = match(case.checkpoint(), case.units)
    assert (found.contradictions if isinstance(found, Mismatch) else ()) == tuple(case.says)
    if case.says:
        return
    assert isinstance(found, FlatMatch)
    assert case.proved is None or list(found.proved) == list(case.proved)
    assert case.groups is None or found.units.groups == case.groups
    assert case.keys is None or found.keys == case.keys


def test_groups_that_nothing_tells_are_not_compared() -> None:
    two = CASES["groups that nothing tells"]
    found = match(two.checkpoint(), two.units)
    assert isinstance(found, Mismatch)
    assert found.uncompared == 2
