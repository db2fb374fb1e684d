"""Wrappers' prefixes go, are reported, and never make two keys one."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState
from fsdpckpt.ir.names import clean, leading_wrapper, respelled, revisits_a_module
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.row_names import RowNames, normalise
from tests.ir.checkpoints import checkpoint, tensor


def _checkpoint(model: list[str] | None, optim: list[str] | None, metadata: object = None) -> Checkpoint:
    state = None
    if optim is not None:
        entries = {name: {"exp_avg": tensor(3)} for name in optim}
        state = Optimizer.of(entries, [{"lr": 0.1, "params": optim, "param_names": [f"_orig_mod.{n}" for n in optim]}])
    held = checkpoint(None, state)
    return held if model is None else replace(held, model=ModelState({name: tensor(3) for name in model}, metadata))


@pytest.mark.parametrize(
    ("written", "bare"),
    [
        ("_fsdp_wrapped_module.l.0._fsdp_wrapped_module.a.weight", "l.0.a.weight"),
        ("_orig_mod.l._checkpoint_wrapped_module.w", "l.w"),
        ("_fpw_module.w", "w"),
        ("l.my_orig_mod.w", "l.my_orig_mod.w"),
        ("module.l.w", "module.l.w"),
        ("_fsdp_wrapped_module._flat_param", "_flat_param"),
    ],
)
def test_only_whole_segments_of_wrappers_go(written: str, bare: str) -> None:
    assert clean(written) == bare


def test_a_compiled_model_and_its_uncompiled_optimizer_come_together_and_get_their_names_back() -> None:
    source = _checkpoint(["_orig_mod.l.w", "_orig_mod.b"], ["l.w", "b"], {"_orig_mod.l": {"version": 1}})
    found, names = normalise(source)
    assert list(found.model.params) == ["l.w", "b"] == list(found.optim.state)
    assert found.notes == ()
    assert names.put_back_wrappers(found) == source
    noted = names.report_wrappers(found)
    assert (noted.model.params, noted.optim) == (found.model.params, found.optim)
    assert noted.model.metadata == {"l": {"version": 1}}
    assert noted.notes[-1].kind == "normalised"
    assert noted.notes[-1].keys == ("_orig_mod.l.w -> l.w", "_orig_mod.b -> b")


def test_an_optimizer_that_was_keyed_by_id_is_named_like_its_model() -> None:
    found, names = normalise(_checkpoint(["_orig_mod.l.w", "_orig_mod.b"], None))
    state = {"l.w": {}, "b": {}}
    named = replace(found, optim=Optimizer.of(state, [{"params": ["l.w", "b"]}]))
    optim = names.put_back_wrappers(named).optim
    assert list(optim.state) == ["_orig_mod.l.w", "_orig_mod.b"] == optim.param_groups[0]["params"]


def test_names_out_of_flat_parameters_of_a_compiled_model_begin_as_those_do() -> None:
    assert leading_wrapper(["_orig_mod._flat_param", "_orig_mod.l._flat_param"]) == "_orig_mod."
    assert leading_wrapper(["_orig_mod._flat_param", "l._flat_param"]) == leading_wrapper([]) == ""
    found, names = normalise(_checkpoint(["l.w"], ["l.w"]), leading="_orig_mod.")
    restored = names.put_back_wrappers(found)
    assert list(restored.model.params) == ["_orig_mod.l.w"] == list(restored.optim.state)


def test_a_buffer_of_a_compiled_model_and_what_comes_out_of_its_flat_parameters_begin_alike() -> None:
    found, names = normalise(_checkpoint(["l.w", "_orig_mod.l.buffer"], None), leading="_orig_mod.")
    assert list(found.model.params) == ["l.w", "l.buffer"]
    assert list(names.put_back_wrappers(found).model.params) == ["_orig_mod.l.w", "_orig_mod.l.buffer"]


def test_fsdp_s_own_prefixes_stay_in_the_optimizer_only_where_the_model_has_them() -> None:
    wrapped = ["_fsdp_wrapped_module.l._fsdp_wrapped_module._orig_mod.w", "_fsdp_wrapped_module.b"]
    for model, restored in ((["l._orig_mod.w", "b"], ["l._orig_mod.w", "b"]), (wrapped, wrapped)):
        found, names = normalise(_checkpoint(model, wrapped), like=model)
        assert list(names.put_back_wrappers(found).optim.state) == restored
        assert [note.keys for note in found.notes] == ([] if model == wrapped else [tuple(wrapped)])
    found, names = normalise(_checkpoint(None, wrapped), like=wrapped)  # of which only the optimizer is taken
    assert list(names.put_back_wrappers(found).optim.state) == wrapped


@pytest.mark.parametrize(
    ("model", "optim", "bare"),
    [
        (["_orig_mod.b"], ["_orig_mod.b"], ["b"]),
        (["module.l.w", "module.b"], ["l.w", "b"], ["l.w", "b"]),
        (["l.w", "b"], ["module.l.w", "module.b"], ["l.w", "b"]),
    ],
)
def test_prefixes_go_that_both_have_or_one_has_and_the_other_does_not(
    model: list[str], optim: list[str], bare: list[str]
) -> None:
    found, _ = normalise(_checkpoint(model, optim))
    (group,) = found.optim.param_groups
    assert list(found.model.params) == bare == list(found.optim.state) == group["params"]
    assert group["param_names"] == [f"_orig_mod.{name}" for name in optim], "as they were written"


@pytest.mark.parametrize(
    ("model", "optim"),
    [
        (["l.w", "b"], ["l.w", "b"]),
        (["module.l.w", "module.b"], ["module.l.w", "module.b"]),  # it may be a module of the model
        (["module.l.w", "b"], ["l.w", "b"]),
        (["module.w"], None),
    ],
)
def test_clean_names_change_nothing_at_all(model: list[str], optim: list[str] | None) -> None:
    plain = _checkpoint(model, optim)
    found, names = normalise(plain)
    assert found is plain and names.put_back_wrappers(plain) == plain


def test_putting_names_back_reads_the_list_of_all_names_a_few_times_and_not_once_for_each() -> None:
    reads: list[str] = []

    class Counted(dict[str, str]):
        def items(self) -> Any:
            reads.append("all")
            return super().items()

    listed = [f"layers.{number}.w" for number in range(100)]
    names = RowNames(Counted(zip(listed, listed, strict=True)), Counted(zip(listed, listed, strict=True)))
    restored = names.put_back_wrappers(_checkpoint(listed, listed))
    assert list(restored.model.params) == listed == list(restored.optim.state)
    assert len(reads) < 10


def test_two_keys_that_would_become_one_are_refused_with_both_names() -> None:
    with pytest.raises(SourceUnsupportedError) as error:
        normalise(_checkpoint(["_orig_mod.b", "c", "b"], None))
    assert error.value.details == ("_orig_mod.b and b -> b",)


def test_module_versions_follow_the_keys() -> None:
    metadata = OrderedDict({"": {"version": 1}, "_orig_mod": {"version": 7}, "_orig_mod.bn": {"version": 2}})
    found, names = normalise(_checkpoint(["_orig_mod.bn.w"], None, metadata))
    cleaned = names.report_wrappers(found).model.metadata
    assert cleaned == {"": {"version": 7}, "bn": {"version": 2}} and isinstance(cleaned, OrderedDict)
    assert names.put_back_wrappers(found).model.metadata is metadata


def test_ids_and_entries_of_a_user_pass_untouched() -> None:
    optim = Optimizer.of({0: {"exp_avg": tensor(3)}, "mine": {"a": 1}}, [{"params": [0]}])
    found, _ = normalise(replace(_checkpoint(["_orig_mod.b"], None), optim=optim))
    assert list(found.optim.state) == [0, "mine"] and found.optim.param_groups == [{"params": [0]}]


@pytest.mark.parametrize(
    ("names", "back"),
    [
        ("w a.w a.b.w a.c.w b.w", False),
        ("", False),
        ("w", False),
        ("a.w w", True),
        ("a.b.w a.w", True),
        ("a.w b.w a.v", True),
        ("a.b.w a.c.w a.b.v", True),
        ("a.b.w c.w a.d.w", True),
        ("a.b.c.w a.d.w b.c.w", False),
    ],
)
def test_a_state_dict_has_the_tensors_of_a_module_in_one_place(names: str, back: bool) -> None:
    assert revisits_a_module(names.split()) is back


def test_no_module_lists_its_tensors_apart() -> None:
    def module(depth: int) -> torch.nn.Module:
        made = torch.nn.Module()
        if depth:
            made.first = module(depth - 1)  # type: ignore[assignment]
        made.w = torch.nn.Parameter(torch.zeros(1))
        if depth:
            made.last = module(depth - 1)  # type: ignore[assignment]
        made.v = torch.nn.Parameter(torch.zeros(1))
        return made

    names = list(module(3).state_dict())
    assert len(names) == 30 and not revisits_a_module(names)


@pytest.mark.parametrize(
    ("other", "name", "new", "expected"),
    [
        ("_orig_mod.a.0.w", "a.0.w", "b.0.w", "_orig_mod.b.0.w"),
        ("a.0.w", "_orig_mod.a.0.w", "_orig_mod.b.0.w", "b.0.w"),
        ("module.a.w", "a.w", "b.c.w", "module.b.c.w"),
        ("module.module.w", "module.w", "net.w", "module.net.w"),
        ("a.w", "module.a.w", "a.w", "a.w"),  # ``--strip-prefix module.``: the wrapper is no part of the name
        ("a.w", "_orig_mod.a.w", "x.a.w", "x.a.w"),  # a module in place of the wrapper is one
        ("a._checkpoint_wrapped_module.0.w", "a.0.w", "b.0.w", "b._checkpoint_wrapped_module.0.w"),
        ("a._checkpoint_wrapped_module.0.w", "a.0.w", "b.w", "b._checkpoint_wrapped_module.w"),
        ("a._checkpoint_wrapped_module.0.w", "a.0.w", "a.0.v", "a._checkpoint_wrapped_module.0.v"),
        ("_fsdp_wrapped_module.w", "w", "deep.v", "_fsdp_wrapped_module.deep.v"),
        ("a.w", "a.w", "_orig_mod.b.w", "b.w"),
        ("q.lora_A.default.w", "q.lora_A.w", "k.lora_A.w", "k.lora_A.default.w"),
        ("q.lora_A.default.w", "q.lora_A.w", "q.lora_B.w", "q.lora_B.default.w"),
        ("q.w", "q.modules_to_save.default.w", "k.modules_to_save.default.w", "k.w"),
        ("a.w", "model.a.w", "model.b.w", "b.w"),
        ("a.x.w", "a.y.w", "b.y.w", "a.x.w"),  # another parameter
    ],
)
def test_another_spelling_of_a_parameter_follows_its_new_name(other: str, name: str, new: str, expected: str) -> None:
    assert respelled(other, name, new) == expected


@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=4),
    st.lists(st.integers(0, 4), max_size=3),
    st.lists(st.integers(0, 4), max_size=3),
)
def test_all_spellings_of_a_parameter_stay_spellings_of_one(
    words: list[str], new: list[str], ours: list[int], theirs: list[int]
) -> None:
    def wrapped(names: list[str], places: list[int]) -> str:
        spelled = list(names)
        for place in places:
            spelled.insert(min(place, len(spelled) - 1), "_orig_mod")
        return ".".join(spelled)

    found = respelled(wrapped(words, theirs), wrapped(words, ours), wrapped(new, ours))
    assert clean(found) == ".".join(new)
