"""Param groups by weight decay, as ``--no-weight-decay`` makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from fsdpckpt.errors import NeedsInformationError, SourceUnsupportedError, UsageError
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, ModelState
from fsdpckpt.ir.optimizer import Optimizer, ParamKey
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.transform.weight_decay import STANDARD, list_parameters, note_one_group
from tests.flat.flat_synthetic import checkpoint, whole
from tests.ir.checkpoints import with_origin

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


def test_the_note_lists_the_parameters_without_weight_decay_in_the_order_of_the_groups() -> None:
    names = [f"layers.{number}.{kind}" for number in range(8) for kind in ("weight", "bias")]
    state: dict[ParamKey, dict[str, Tensor | Value]] = {
        name: {"exp_avg": whole(5, 3) if name.endswith("weight") else whole(5)} for name in names
    }
    optim = Optimizer.of(state, [{"lr": 0.1, "weight_decay": 0.5, "params": list(names)}])
    result = list_parameters(checkpoint(1, optim=optim, layout=Layout.FULL), [STANDARD])
    assert listed(result) == [names[::2], names[1::2]]
    assert result.notes[-1].keys == tuple(names[1::2])


def test_vectors_of_stacked_layers_and_experts_have_no_weight_decay() -> None:
    names = list(SHAPES)
    result = list_parameters(megatron(), [STANDARD])
    assert listed(result) == [[names[0], names[4]], [names[1], names[5]], [names[2]], [names[3]]]
    assert listed(list_parameters(megatron(KINDS[:2], {"a": (2, 2), "b.bias": (2, 2)}), [STANDARD])) == [
        ["a"],
        ["b.bias"],
    ]


def test_the_shape_of_the_model_decides_where_a_parameter_has_no_state_of_its_shape() -> None:
    source = megatron(KINDS[:2], {"a": (3,), "b": (3,)})
    source = replace(source, model=ModelState({"a": whole(3, 1), "b": whole(3)}))
    assert listed(list_parameters(source, [STANDARD])) == [["a"], ["b"]]
    assert source.optim is not None
    source.optim.state["b"].pop("exp_avg")
    assert listed(list_parameters(source, [STANDARD])) == [["a"], ["b"]]
    assert listed(list_parameters(replace(source, model=None), [STANDARD])) == [["b"], ["a"]]


def test_experts_are_like_others_where_no_group_is_for_experts() -> None:
    names = list(SHAPES)
    result = list_parameters(megatron(KINDS[:2]), [STANDARD])
    assert listed(result) == [[names[0], names[2], names[4]], [names[1], names[3], names[5]]]


def test_a_group_that_gets_no_parameter_is_left_out() -> None:
    assert listed(list_parameters(megatron(shapes={"w": (2, 2), "b": (2,)}), [STANDARD])) == [["w"], ["b"]]


def test_globs_name_the_parameters_without_weight_decay() -> None:
    result = list_parameters(megatron(KINDS[:2], {"a": (2, 2), "b.c": (2, 2)}), ["b.*"])
    assert listed(result) == [["a"], ["b.c"]]
    split = list_parameters(one_group(["a", "b"], weight_decay=0.5, lr=1), ["b"])
    assert split.optim is not None
    assert split.optim.param_groups == [
        {"weight_decay": 0.5, "lr": 1, "params": ["a"]},
        {"weight_decay": 0.0, "lr": 1, "params": ["b"]},
    ]


def test_weight_decay_itself_tells_groups_apart_that_have_no_multiplier() -> None:
    groups: list[dict[Key, Value]] = [{"weight_decay": 0.0}, {"weight_decay": 0.5}]
    assert listed(list_parameters(megatron(groups, {"a": (2, 2), "b": (2,)}), [STANDARD])) == [["b"], ["a"]]


@pytest.mark.parametrize(
    ("groups", "why"),
    [
        (KINDS[:1], "^no param group fits output.bias"),
        ([*KINDS[:2], KINDS[0]], "^several param groups fit output.weig"),
    ],
)
def test_groups_of_another_rule_are_refused(groups: list[dict[Key, Value]], why: str) -> None:
    shapes = {name: SHAPES[name] for name in ("output.weight", "output.bias")}
    with pytest.raises(NeedsInformationError, match=why) as caught:
        list_parameters(megatron(groups, shapes), [STANDARD])
    assert caught.value.details[0] == "wd_mult 1.0, lr 0.1, is_expert_parallel False"
    assert len(caught.value.details) == len(groups)


def test_settings_that_tell_nothing_apart_are_named() -> None:
    with pytest.raises(NeedsInformationError) as caught:
        list_parameters(megatron([{"eps": 1, "betas": 2}, {"eps": 2}]), [STANDARD])
    assert list(caught.value.details) == ["eps, betas", "eps"]


def test_without_patterns_the_rule_is_asked_for() -> None:
    with pytest.raises(NeedsInformationError, match="in which of its 4 param groups") as caught:
        list_parameters(megatron(), [])
    assert len(caught.value.details) == 4


def test_buffers_of_many_parameters_are_refused() -> None:
    with pytest.raises(SourceUnsupportedError, match="Megatron's buffers") as caught:
        list_parameters(megatron(shapes={}, buffer=1), [STANDARD])
    assert list(caught.value.details) == ["buffer"]
    assert listed(list_parameters(megatron(buffer=1), [STANDARD]))[0]  # beside states by name it is the user's


@pytest.mark.parametrize("patterns", [["*.wrong"], ["*.bias", "*.wrong"]])
def test_a_pattern_that_matches_nothing_is_named(patterns: list[str]) -> None:
    with pytest.raises(UsageError, match=r"no_weight_decay='\*\.wrong' matches none") as caught:
        list_parameters(megatron(), patterns)
    assert list(caught.value.details) == list(SHAPES)[:4]


def test_ids_are_refused_because_a_glob_would_match_digits() -> None:
    with pytest.raises(UsageError, match="keyed by ids"):
        list_parameters(one_group([0, 1]), ["1"])


def test_groups_that_list_their_parameters_need_no_rule() -> None:
    source = one_group(["a", "b"])
    assert source.optim is not None and source.optim.param_groups is not None
    assert list_parameters(source, []) is source
    assert list_parameters(checkpoint(1, model=ModelState({}), layout=Layout.FULL), []).optim is None
    two = replace(source, optim=Optimizer.of(source.optim.state, [{"params": ["a"]}, {"params": ["b"]}]))
    with pytest.raises(UsageError, match="has neither"):
        list_parameters(two, [STANDARD])
    assert list_parameters(with_origin(megatron(), flavor="plain"), []).notes == ()  # another producer's own


def test_one_group_gets_a_note_for_the_trainer() -> None:
    source = one_group(["a", "b"])
    (note,) = note_one_group(source).notes
    assert note.kind == "unconfigured" and "has one param group" in note.message
    assert note_one_group(megatron()).notes == ()
    assert note_one_group(checkpoint(1, model=ModelState({}), layout=Layout.FULL)).notes == ()
