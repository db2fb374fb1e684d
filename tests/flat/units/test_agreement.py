"""Units held against a checkpoint of whole tensors: everything that contradicts them is said, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.flat.units.request import contradictions
from fsdpckpt.ir.checkpoint import Layout, ModelState
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Value
from tests.flat.flat_synthetic import checkpoint, named, sharded_model, whole
from tests.ir.relisted import relisted

PARAMS = (named("a.weight", 5, 3), named("a.bias", 5), named("b.weight", 2, 5), named("b.bias", 2))
NAMES = tuple(param.name for param in PARAMS)
UNITS = build_units(PARAMS, ("", "a", "b"), Settings(use_orig_params=True))


def states(*shapes: tuple[int, ...], step: bool = True) -> dict[str, Tensor | Value]:
    found: dict[str, Tensor | Value] = {"step": whole()} if step else {}
    return {**found, **{f"state{number}": whole(*shape) for number, shape in enumerate(shapes)}}


def by_name(
    entries: Mapping[str, dict[str, Tensor | Value]] | None = None, *groups: Sequence[str], listed: bool = True
) -> Optimizer:
    """Adam's states of all parameters, unless given otherwise, in one group."""
    held = {param.name: states(param.shape, param.shape) for param in PARAMS} if entries is None else dict(entries)
    return Optimizer.of(
        dict(held), [{"lr": 0.1, "params": list(group)} for group in groups or (tuple(held),)] if listed else None
    )


def with_leaf(name: str, leaf: Tensor | Value) -> ModelState:
    return ModelState({**sharded_model(PARAMS).params, name: leaf})


def having(**changed: dict[str, Tensor | Value]) -> dict[str, dict[str, Tensor | Value]]:
    """Adam's states with others for some parameters; two underscores are a dot."""
    return {**by_name().state, **{name.replace("__", "."): entry for name, entry in changed.items()}}  # type: ignore[dict-item]


def turned(*shape: int) -> Tensor:
    """A dense matrix whose columns lie one after the other."""
    one = whole(*shape, offset=4096)
    return replace(one, chunks=one.chunks.with_boxes(stride=np.asarray([[1, shape[0]]])))


def built(
    params: Sequence[Parameter], prefixes: Sequence[str] = ("", "a", "b"), *, orig: bool = True, **more: object
) -> Units:
    return build_units(params, prefixes, Settings(use_orig_params=orig), **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """A checkpoint of whole tensors, cast to ``dtype``, and what ``units`` and it contradict each other in."""

    says: Sequence[str] = ()
    model: ModelState | None = None
    optim: Optimizer | None = None
    units: Units = UNITS
    dtype: str | None = None
    layout: Layout = Layout.FULL


MODEL = sharded_model(PARAMS)
HALF = with_leaf("a.weight", whole(5, 3, dtype=DTYPES["bfloat16"]))
TABLE = (*PARAMS, named("table", 7, dtype="int32"))
COLUMNS = built((replace(PARAMS[0], stride=(1, 5)), *PARAMS[1:]))
TIED = relisted(UNITS, shared=(("head.weight", "a.weight"),))
SWAPPED = built([PARAMS[index] for index in (1, 0, 2, 3)])
TWO_GROUPS, ONE_GROUP = UNITS.with_groups((NAMES[:2], NAMES[2:])), UNITS.with_groups((NAMES,))
EMPTY = Tensor(DTYPES["float32"], (0, 3), Chunks.whole(file=0, offset=0, shape=(0, 3)), sharded=True)
WRAPPED = {name.replace(".", "._fsdp_wrapped_module."): entry for name, entry in by_name().state.items()}
UNKNOWN_STATE = "the optimizer has states of c, which the units do not have"
UNKNOWN_NAME = "the param groups list c, which the units do not have"

# fmt: off
CASES: dict[str, Case] = {
    "the model and the optimizer of this job": Case(model=MODEL, optim=by_name()),
    "the model alone": Case(model=MODEL),
    "the optimizer alone": Case(optim=by_name()),

    # The model
    "a parameter that only the units have": Case(
        ["b.bias is in the units, not in the model section"], sharded_model(PARAMS[:3])),
    "a parameter that only the model has": Case(
        ["the model section has a parameter c, the units do not"], with_leaf("c", whole(4, offset=999))),
    "a buffer": Case(model=with_leaf("c", whole(4, offset=999, sharded=False))),
    "what may be a buffer": Case(model=with_leaf("c", whole(4, offset=999, sharded=None))),
    "another shape of as many elements": Case(
        ["a.weight: [5, 3] in the units, [3, 5] in the model section"], with_leaf("a.weight", whole(3, 5))),
    "another dtype": Case(["a.weight: float32 in the units, bfloat16 in the model section"], HALF),
    "another dtype that a cast makes the units'": Case(model=HALF, dtype="float32"),
    "a dtype that a cast makes another": Case(
        [f"{name}: float32 in the units, float16 in the model section" for name in NAMES], MODEL, dtype="float16"),
    "integers, which a cast leaves what they are": Case(
        model=sharded_model(TABLE), units=built(TABLE), dtype="float32"),
    "another memory order, which a flat parameter holds": Case(
        ["a.weight: strides None in the units, (1, 5) in the model section"], with_leaf("a.weight", turned(5, 3))),
    "the same memory order": Case(model=with_leaf("a.weight", turned(5, 3)), units=COLUMNS),
    "a row-major copy, as containers that know no strides store it": Case(model=MODEL, units=COLUMNS),
    "no elements, and so no strides": Case(
        model=with_leaf("none", EMPTY), units=built((*PARAMS, named("none", 0, 3)))),
    "a shared parameter under both names": Case(
        model=ModelState({**MODEL.params, "head.weight": MODEL.params["a.weight"]}), units=TIED),
    "a shared parameter and its copy": Case(model=with_leaf("head.weight", whole(5, 3, offset=4096)), units=TIED),
    "a shared parameter under its later name first": Case(
        model=ModelState({"head.weight": MODEL.params["a.weight"], **MODEL.params}), units=TIED),
    "a shared name that is another's": Case(
        ["head.weight is another name of a.weight in the units, of b.weight in the model section"],
        ModelState({**MODEL.params, "head.weight": MODEL.params["b.weight"]}), units=TIED),
    "a shared name of another shape": Case(
        ["head.weight: [5, 3] in the units, [7] in the model section"], with_leaf("head.weight", whole(7, offset=4096)),
        units=TIED),
    "no tensors at all": Case(
        [f"{name} is in the units, not in the model section" for name in NAMES], ModelState({"extra": 1})),
    "another order than the model's": Case(
        ["the order of parameters differs in unit 'a': a.bias in the units, a.weight in the model section"],
        MODEL, units=SWAPPED),
    "an alphabetical order, which is none": Case(
        model=sharded_model(sorted(PARAMS, key=lambda param: param.name))),
    "the order of names that unflattened slices got from other units": Case(
        model=MODEL, units=SWAPPED, layout=Layout.FLATTENED),

    # The states of the optimizer
    "states of an unknown parameter": Case([UNKNOWN_STATE], optim=by_name(having(c=states((4,))))),
    "states of an unknown parameter, without groups": Case(
        [UNKNOWN_STATE], optim=by_name(having(c=states((4,))), listed=False)),
    "an entry that no group lists": Case(optim=by_name(having(counts=states((4,))), NAMES)),
    "an entry without tensors, without groups": Case(optim=by_name(having(notes={"text": "kept"}), listed=False)),
    "an unknown name in a group": Case([UNKNOWN_NAME], optim=by_name(None, (*NAMES, "c"))),
    "an unknown name with an empty entry": Case([UNKNOWN_NAME], optim=by_name(having(c={}), (*NAMES, "c"))),
    "states of another shape": Case(
        ["a.weight: [5, 3] in the units, its optimizer states are [3, 5]"],
        optim=by_name(having(a__weight=states((3, 5), (3, 5))))),
    "factors": Case(optim=by_name(having(a__weight=states((5, 1), (1, 3))))),
    "one shape beside the parameter's": Case(optim=by_name(having(a__weight=states((5, 3), (9,))))),
    "a counter": Case(optim=by_name(having(a__weight=states((1,), (5, 3))))),
    "a text": Case(optim=by_name(having(a__weight={"note": "text", **states((5, 3))}))),
    "0-dim states": Case(optim=by_name(having(a__weight=states()))),
    "states of a shared parameter under both names": Case(
        ["the optimizer has states for a.weight and for head.weight, which are one parameter in the units"],
        ModelState({**MODEL.params, "head.weight": MODEL.params["a.weight"]}),
        by_name(having(head__weight=states((5, 3), (5, 3))), NAMES), TIED),
    "names with wrappers": Case(optim=by_name(WRAPPED)),
    "names with wrappers in known groups": Case(optim=by_name(WRAPPED), units=ONE_GROUP),
    "an unknown name with a wrapper": Case(
        [UNKNOWN_STATE], optim=by_name({**WRAPPED, "_orig_mod.c": states((4,))})),
    "ids, which others name": Case(optim=Optimizer.of({0: states((9, 9))}, [{"lr": 0.1, "params": [0, 1, 2, 3]}])),

    # Its groups
    "another number of groups": Case(
        ["the optimizer has 1 param groups, the units have 2"], optim=by_name(), units=TWO_GROUPS),
    "no group at all": Case(
        ["the optimizer has 0 param groups, the units have 1"], optim=Optimizer.of({}, []), units=ONE_GROUP),
    "the same groups": Case(optim=by_name(None, NAMES[:2], NAMES[2:]), units=TWO_GROUPS),
    "a parameter in another group": Case(
        ["param group 1 lists a.bias, and the units do not"], optim=by_name(None, NAMES[:1], NAMES[1:]),
        units=TWO_GROUPS),
    "groups in another order": Case(
        ["param group 0 lists b.bias, and the units do not", "param group 0 lists b.weight, and the units do not",
         "param group 1 lists a.bias, and the units do not", "param group 1 lists a.weight, and the units do not"],
        optim=by_name(None, NAMES[2:], NAMES[:2]), units=TWO_GROUPS),
    "a parameter in no group": Case(
        ["no param group lists a.weight, which is in group 0 of the units"], optim=by_name(None, NAMES[1:]),
        units=ONE_GROUP),
    "a parameter in no group that FSDP does not manage": Case(
        optim=by_name(None, NAMES[1:]), units=built(PARAMS, ("a", "b"), unmanaged=["a.weight"])),
    "a flat parameter in no group": Case(
        ["no param group lists a._flat_param, which is in group 0 of the units"], optim=by_name(None, NAMES[2:]),
        units=built(PARAMS, ("a", "b"), orig=False).with_groups((("a._flat_param", "b._flat_param"),))),
    "a group that lists nothing": Case(
        [f"no param group lists {name}, which is in group 0 of the units" for name in NAMES],
        optim=Optimizer.of({}, [{"lr": 0.1, "params": []}]), units=ONE_GROUP),
    "a parameter in two groups": Case(["a.weight is in 2 param groups"], optim=by_name(None, NAMES, NAMES[:1])),
    "an unknown name, whose groups are not compared": Case(
        [UNKNOWN_NAME], optim=by_name(None, (*NAMES, "c")), units=TWO_GROUPS),
    "an optimizer without groups": Case(optim=by_name(listed=False), units=TWO_GROUPS),
    "units without groups": Case(optim=Optimizer.of(dict(by_name().state), [{"lr": 0.1, "params": []}])),
}
# fmt: on


@pytest.mark.parametrize("name", CASES)
def test_units_are_held_against_a_checkpoint_of_whole_tensors(name: str) -> None:
    case = CASES[name]
    held = checkpoint(1, model=case.model, optim=case.optim, layout=case.layout)
    dtype = DTYPES[case.dtype] if case.dtype is not None else None
    assert sorted(contradictions(case.units, held, dtype=dtype)) == sorted(case.says)
