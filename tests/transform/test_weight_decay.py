"""Param groups by weight decay, as ``--no-weight-decay`` makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from fsdpckpt.ir.checkpoint import Checkpoint, Layout, ModelState
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.transform.weight_decay import STANDARD, list_parameters, note_one_group
from tests.flat.flat_synthetic import checkpoint, whole
from tests.ir.checkpoints import with_origin
from tests.refusals import Refused

SHAPES = {
    "decoder.layers.qkv.weight": (2, 5, 3),  # all layers in one tensor
    "decoder.layers.norm.weight": (2, 5),
    "decoder.layers.mlp.experts.experts.fc.weight": (2, 4, 5, 3),
    "decoder.layers.mlp.experts.experts.norm.weight": (2, 4, 5),
    "output.weight": (7, 3),
    "output.bias": (7,),
}
KINDS: list[dict[Key, Value]] = [
    {"wd_mult": 1.0, "lr": 0.1, "is_expert_parallel": False},
    {"wd_mult": 0.0, "lr": 0.1, "is_expert_parallel": False},
    {"wd_mult": 1.0, "lr": 0.1, "is_expert_parallel": True},
    {"wd_mult": 0.0, "lr": 0.1, "is_expert_parallel": True},
]


def megatron(
    groups: Sequence[dict[Key, Value]] = KINDS, shapes: dict[str, tuple[int, ...]] = SHAPES, **extra: Value
) -> Checkpoint:
    state: dict[ParamKey, dict[str, Tensor | Value]] = {
        name: {"step": whole(), "exp_avg": whole(*shape)} for name, shape in shapes.items()
    }
    optim = Optimizer.of(state, [dict(group) for group in groups], dict(extra))
    return with_origin(checkpoint(1, optim=optim, layout=Layout.FULL), flavor="megatron")


def listed(source: Checkpoint) -> list[Value]:
    assert source.optim is not None and source.optim.param_groups is not None
    return [group["params"] for group in source.optim.param_groups]


def one_group(keys: Sequence[ParamKey], **settings: Value) -> Checkpoint:
    state: dict[ParamKey, dict[str, Tensor | Value]] = {key: {"exp_avg": whole(5, 3)} for key in keys}
    return checkpoint(1, optim=Optimizer.of(state, [{**settings, "params": list(keys)}]), layout=Layout.FULL)


def alone(shapes: Mapping[str, tuple[int, ...]], **settings: Value) -> Checkpoint:
    """An optimizer with one group that lists its parameters."""
    state: dict[ParamKey, dict[str, Tensor | Value]] = {
        name: {"exp_avg": whole(*shape)} for name, shape in shapes.items()
    }
    return checkpoint(1, optim=Optimizer.of(state, [{**settings, "params": list(shapes)}]), layout=Layout.FULL)


def with_model(source: Checkpoint, **shapes: tuple[int, ...]) -> Checkpoint:
    return replace(source, model=ModelState({name: whole(*shape) for name, shape in shapes.items()}))


def bare(source: Checkpoint, name: str) -> Checkpoint:
    """``source`` without the moment of one parameter."""
    assert source.optim is not None
    source.optim.state[name].pop("exp_avg")
    return source


@dataclass(frozen=True)
class Row:
    """``found``: the parameters of each group afterwards, or how the rule is refused; ``patterns``: of the rule."""

    found: Sequence[Sequence[str]] | Refused
    source: Checkpoint
    patterns: Sequence[str] = (STANDARD,)
    settings: Sequence[Mapping[Key, Value]] = field(default_factory=list)


QKV, NORM, EXPERT, EXPERT_NORM, OUTPUT, BIAS = SHAPES
TWO = {"a": (2, 2), "b.c": (2, 2)}
VECTORS: dict[str, tuple[int, ...]] = {"a": (3,), "b": (3,)}
LAYERS = {f"layers.{n}.{kind}": (5, 3)[: 2 if kind == "weight" else 1] for n in range(8) for kind in ("weight", "bias")}
HALVES: list[dict[Key, Value]] = [{"weight_decay": 0.0}, {"weight_decay": 0.5}]
OUTPUTS = {OUTPUT: SHAPES[OUTPUT], BIAS: SHAPES[BIAS]}

# fmt: off
ROWS: dict[str, Row] = {
    "vectors of stacked layers and experts": Row([[QKV, OUTPUT], [NORM, BIAS], [EXPERT], [EXPERT_NORM]], megatron()),
    "a matrix that is called bias": Row([["a"], ["b.bias"]], megatron(KINDS[:2], {"a": (2, 2), "b.bias": (2, 2)})),
    "experts, where no group is for them": Row(
        [[QKV, EXPERT, OUTPUT], [NORM, EXPERT_NORM, BIAS]], megatron(KINDS[:2])),
    "a group that gets no parameter": Row([["w"], ["b"]], megatron(shapes={"w": (2, 2), "b": (2,)})),
    "globs": Row([["a"], ["b.c"]], megatron(KINDS[:2], TWO), ["b.*"]),
    "weight decay itself, where groups have no multiplier": Row(
        [["b"], ["a"]], megatron(HALVES, {"a": (2, 2), "b": (2,)})),
    "one group is divided": Row(
        [["a"], ["b"]], alone({"a": (5, 3), "b": (5, 3)}, weight_decay=0.5, lr=1), ["b"],
        [{"weight_decay": 0.5, "lr": 1, "params": ["a"]}, {"weight_decay": 0.0, "lr": 1, "params": ["b"]}]),
    "the order of the groups": Row([[*LAYERS][::2], [*LAYERS][1::2]], alone(LAYERS, lr=0.1, weight_decay=0.5)),
    "the shape of the model, where a state has another": Row(
        [["a"], ["b"]], with_model(megatron(KINDS[:2], VECTORS), a=(3, 1), b=(3,))),
    "the shape of the model, where there is no state": Row(
        [["a"], ["b"]], with_model(bare(megatron(KINDS[:2], VECTORS), "b"), a=(3, 1), b=(3,))),
    "no shape at all": Row([["b"], ["a"]], bare(megatron(KINDS[:2], VECTORS), "b")),
    "buffers beside states by name, which are the user's": Row(
        [[QKV, OUTPUT], [NORM, BIAS], [EXPERT], [EXPERT_NORM]], megatron(buffer=1)),

    "no group that fits": Row(
        Refused(4, "no param group fits output.bias", ["wd_mult 1.0, lr 0.1, is_expert_parallel False"]),
        megatron(KINDS[:1], OUTPUTS)),
    "several groups that fit": Row(
        Refused(4, ["several param groups fit output.weig", "wd_mult 1.0, lr 0.1, is_expert_parallel False"]),
        megatron([*KINDS[:2], KINDS[0]], OUTPUTS)),
    "settings that tell nothing apart": Row(
        Refused(4, details=["eps, betas", "eps"]), megatron([{"eps": 1, "betas": 2}, {"eps": 2}])),
    "no rule": Row(Refused(4, "in which of its 4 param groups"), megatron(), []),
    "buffers of many parameters": Row(Refused(3, "Megatron's buffers", ["buffer"]), megatron(shapes={}, buffer=1)),
    "a pattern that matches nothing": Row(
        Refused(2, ["*.wrong", "matches none"], list(SHAPES)[:4]), megatron(), ["*.wrong"]),
    "a pattern more that matches nothing": Row(
        Refused(2, ["*.wrong", "matches none"], list(SHAPES)[:4]), megatron(), ["*.bias", "*.wrong"]),
    "ids, of which a glob would match digits": Row(Refused(2, "keyed by ids"), one_group([0, 1]), ["1"]),
    "two groups that list their parameters": Row(
        Refused(2, "has neither"), checkpoint(1, optim=Optimizer.of(
            {"a": {"exp_avg": whole(5, 3)}, "b": {"exp_avg": whole(5, 3)}}, [{"params": ["a"]}, {"params": ["b"]}]))),
}
# fmt: on


@pytest.mark.parametrize("name", ROWS)
def test_parameters_are_put_into_groups_by_the_rule(name: str) -> None:
    row = ROWS[name]
    if isinstance(row.found, Refused):
        row.found.by(lambda: list_parameters(row.source, list(row.patterns)))
        return
    found = list_parameters(row.source, list(row.patterns))
    assert listed(found) == row.found
    assert found.optim is not None
    assert not row.settings or found.optim.param_groups == row.settings
    if "order" in name:
        assert found.notes[-1].keys == tuple(row.found[1])


def test_groups_that_list_their_parameters_need_no_rule() -> None:
    source = one_group(["a", "b"])
    assert list_parameters(source, []) is source
    assert list_parameters(checkpoint(1, model=ModelState({}), layout=Layout.FULL), []).optim is None
    assert list_parameters(with_origin(megatron(), flavor="plain"), []).notes == ()  # another producer's own


def test_one_group_gets_a_note_for_the_trainer() -> None:
    source = one_group(["a", "b"])
    (note,) = note_one_group(source).notes
    assert note.kind == "unconfigured" and "has one param group" in note.message
    assert note_one_group(megatron()).notes == ()
    assert note_one_group(checkpoint(1, model=ModelState({}), layout=Layout.FULL)).notes == ()
