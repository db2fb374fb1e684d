"""What is taken and how it is named: exact names, both sections in step, nothing matched by accident."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest

from fsdpckpt.errors import NeedsInformationError, SourceMissingError, UsageError
from fsdpckpt.ir import SectionName
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, ModelState, NamedSection, Origin, Section
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.rows import undetermined
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.transform.renaming import Renaming
from fsdpckpt.transform.selection import (
    choose_section,
    copy_aliased_tensors,
    find_unmatched_globs,
    keep_keys,
    parameter_names,
    select_section,
)
from fsdpckpt.transform.sharded import ShardingHints, decide_sharded, mark_sharded, note_undetermined
from tests.ir.checkpoints import with_origin


def select_keys(held: Checkpoint, *, include: list[str], exclude: list[str]) -> Checkpoint:
    """``--include`` and ``--exclude`` for a checkpoint that is the only one: a glob that matches nothing is refused."""
    names_of_each = {name: (name,) for name in parameter_names(held)}
    for error in find_unmatched_globs(names_of_each, include, exclude, held.source):
        raise error
    return keep_keys(held, names_of_each, include=include, exclude=exclude)


def rename(
    held: Checkpoint, *, strip_prefix: str | None, add_prefix: str | None, pairs: list[tuple[str, str]]
) -> Checkpoint:
    renamed, unmatched = Renaming(strip_prefix, pairs, add_prefix).applied_to(held)
    for error in unmatched:
        raise error
    return renamed


def _tensor(*shape: int, sharded: bool | None = None, offset: int = 0) -> Tensor:
    return Tensor(DTYPES["float32"], shape, Chunks.whole(file=0, offset=offset, shape=shape), sharded)


def _checkpoint(*, ids: bool = False, sharded: bool | None = None) -> Checkpoint:
    names = ["net.a.weight", "net.a.bias", "head.weight"]
    shapes = [(5, 3), (5,), (5, 3)]
    params = {name: _tensor(*shapes[i], sharded=sharded, offset=100 * i) for i, name in enumerate(names)}
    params["net.running"] = _tensor(7, offset=900)
    keys = list(range(3)) if ids else names
    optim = Optimizer.of(
        state={key: {"exp_avg": _tensor(*shapes[i]), "step": _tensor()} for i, key in enumerate(keys)},
        param_groups=[
            {"lr": 0.1, "params": keys[:2], "param_names": names[:2]},
            {"lr": 0.2, "params": keys[2:], "param_names": names[2:]},
        ],
    )
    return Checkpoint(
        Origin("SRC", Layout.FULL, Container.TORCH, "plain", 1),
        files=(),
        model=ModelState(dict(params), OrderedDict()),
        optim=optim,
        extra={"epoch": 3},
    )


def test_only_one_section_stays_and_the_others_are_named_as_dropped() -> None:
    taken = select_section(_checkpoint(), Section.OPTIM)
    assert taken.model is None and taken.extra == {} and taken.optim is not None
    assert [(note.kind, note.message) for note in taken.notes] == [
        ("dropped", f"--only optim: the section {name} was left out") for name in ("model", "extra")
    ]


def test_no_tensor_of_the_model_or_of_a_state_is_that_of_another_section() -> None:
    checkpoint = _checkpoint()
    own = copy_aliased_tensors(checkpoint)
    assert list(own.leaves()) and not set(own.leaves()) & set(checkpoint.leaves())
    assert [named.key for named in own.tensors()] == [named.key for named in checkpoint.tensors()]
    assert copy_aliased_tensors(replace(checkpoint, model=None, optim=None)).model is None


def _several(section: Section, *names: str) -> Checkpoint:
    """A checkpoint with several models or optimizers, none of which is the main one."""
    one = _checkpoint()
    content = one.model if section is Section.MODEL else one.optim
    named = tuple(NamedSection(section, name, ("all", name), content) for name in names)
    return replace(one, model=None, optim=None, named=named)


@pytest.mark.parametrize("only", [Section.MODEL, Section.OPTIM])
def test_of_several_sections_none_is_taken_but_the_one_that_is_named(only: Section) -> None:
    several = _several(only, "critic", "generator_ema")
    with pytest.raises(NeedsInformationError, match=r"has 2 .*, and only=.* takes one") as error:
        choose_section(several, only)
    assert list(error.value.details) == [f"--only {only}:critic", f"--only {only}:generator_ema"]
    for name in ("generator_ema", "all.generator_ema"):
        chosen = choose_section(several, SectionName(f"{only}:{name}"))
        section = chosen.model if only is Section.MODEL else chosen.optim
        assert section is several.named[1].content and not chosen.named
        assert f"--only {only}:generator_ema: the section {only}:critic was left out" in [
            n.message for n in chosen.notes
        ]
    with pytest.raises(UsageError, match="of the name generator_em") as wrong:
        choose_section(several, SectionName(f"{only}:generator_em"))
    assert str(wrong.value.next_step) == f"did you mean --only {only}:generator_ema?"
    other = Section.OPTIM if only is Section.MODEL else Section.MODEL
    with pytest.raises(SourceMissingError):
        select_section(choose_section(several, other), other)


def test_the_main_section_has_a_name_too_and_the_only_other_one_needs_none() -> None:
    one = with_origin(_checkpoint(), nesting={Section.MODEL: ("net",)})
    for name in ("net", "model"):
        assert choose_section(one, SectionName(f"model:{name}")) is one
    assert choose_section(_several(Section.MODEL, "ema"), Section.MODEL).model is not None


def test_a_section_that_is_not_there_is_an_error() -> None:
    with pytest.raises(SourceMissingError, match="no model section"):
        select_section(select_section(_checkpoint(), Section.OPTIM), Section.MODEL)


def test_exclude_drops_a_parameter_from_model_state_and_groups_together() -> None:
    taken = select_keys(_checkpoint(), include=[], exclude=["*.bias"])
    assert list(taken.model.params) == ["net.a.weight", "head.weight", "net.running"]
    assert list(taken.optim.state) == ["net.a.weight", "head.weight"]
    assert [group["params"] for group in taken.optim.param_groups] == [["net.a.weight"], ["head.weight"]]
    assert [group["param_names"] for group in taken.optim.param_groups] == [["net.a.weight"], ["head.weight"]]
    assert taken.notes[0].keys == ("net.a.bias",)


def test_without_options_nothing_changes_and_nothing_is_noted() -> None:
    checkpoint = _checkpoint()
    assert select_keys(checkpoint, include=[], exclude=[]) is checkpoint
    assert rename(checkpoint, strip_prefix=None, add_prefix=None, pairs=[]) is checkpoint


def test_a_glob_that_matches_nothing_is_an_error() -> None:
    for glob, closest in (
        ("nett.*", ["'net.*'", "'net.a.*'"]),
        ("net.a", ["'net.a.*'"]),
        ("a.w", ["net.a.weight"]),
        ("zzz", []),
    ):
        with pytest.raises(UsageError, match="matches no key") as error:
            select_keys(_checkpoint(), include=[glob], exclude=[])
        assert list(error.value.details) == [f"did you mean {name}?" for name in closest]


def test_a_dotted_prefix_is_renamed_in_every_section_and_a_longer_word_is_not() -> None:
    named = rename(_checkpoint(), strip_prefix=None, add_prefix="model.", pairs=[("net", "body"), ("hea", "x")][:1])
    assert list(named.model.params)[:2] == ["model.body.a.weight", "model.body.a.bias"]
    assert list(named.optim.state) == ["model.body.a.weight", "model.body.a.bias", "model.head.weight"]
    assert named.optim.param_groups[1]["params"] == ["model.head.weight"]
    with pytest.raises(UsageError, match="applies to no key"):
        rename(_checkpoint(), strip_prefix=None, add_prefix=None, pairs=[("hea", "x")])


def test_two_keys_with_one_new_name_are_refused() -> None:
    with pytest.raises(UsageError, match="would both be named"):
        rename(_checkpoint(), strip_prefix=None, add_prefix=None, pairs=[("net.a.bias", "head.weight")])


def test_stripping_a_prefix_drops_module_versions_whose_keys_no_longer_fit() -> None:
    named = rename(_checkpoint(), strip_prefix="net.", add_prefix=None, pairs=[])
    assert list(named.model.params) == ["a.weight", "a.bias", "head.weight", "running"]
    assert named.model.metadata is None
    assert any("_metadata" in note.message for note in named.notes)


def _sharded(checkpoint: Checkpoint) -> dict[str, bool | None]:
    return {name: leaf.sharded for name, leaf in checkpoint.model.params.items()}


def test_parameters_the_optimizer_lists_are_sharded_and_the_rest_must_be_settled() -> None:
    with pytest.raises(NeedsInformationError, match="parameters") as caught:
        decide_sharded(_checkpoint(), ShardingHints(), strict=True)
    assert caught.value.details == ("net.running",)
    assert "--buffers" in (caught.value.next_step or "")
    assert "the optimizer does not list these keys" in (caught.value.why or "")
    with pytest.raises(NeedsInformationError) as caught:
        decide_sharded(replace(_checkpoint(), optim=None), ShardingHints(), strict=True)
    assert "it has no optimizer" in (caught.value.why or "")


@pytest.mark.parametrize(
    ("evidence", "running"),
    [
        (ShardingHints(buffers=("net.run*",)), False),
        (ShardingHints(buffers=("none",)), True),
        (ShardingHints(reference={"net.running": False}), False),
        (ShardingHints(reference={"net.running": True}), True),
    ],
)
def test_options_settle_what_a_full_source_does_not_say(evidence: ShardingHints, running: bool) -> None:
    decided = decide_sharded(_checkpoint(), evidence, strict=True)
    assert _sharded(decided) == {
        "net.a.weight": True,
        "net.a.bias": True,
        "head.weight": True,
        "net.running": running,
    }
    for states in decided.optim.state.values():
        assert states["exp_avg"].sharded is True and states["step"].sharded is False
    assert [note.message for note in decided.notes] == ["3 model keys are parameters: the optimizer lists them"] * (
        not evidence.buffers
    )


def test_without_an_optimizer_only_options_and_the_source_decide() -> None:
    checkpoint = replace(_checkpoint(), optim=None)
    assert _sharded(mark_sharded(checkpoint, ShardingHints(reference={"net.running": False}))) == {
        "net.a.weight": None,
        "net.a.bias": None,
        "head.weight": None,
        "net.running": False,
    }
    without = replace(checkpoint, model=None)
    assert mark_sharded(without, ShardingHints()).model is None
    assert decide_sharded(without, ShardingHints(buffers=("x",)), strict=True).model is None
    with pytest.raises(UsageError, match="buffers='x' matches no model key of SRC"):
        decide_sharded(checkpoint, ShardingHints(buffers=("x",)), strict=True)


def test_a_weight_that_shares_its_bytes_with_a_listed_one_is_a_parameter_too() -> None:
    checkpoint = _checkpoint()
    checkpoint.model.params["net.running"] = checkpoint.model.params["head.weight"]
    assert set(_sharded(decide_sharded(checkpoint, ShardingHints(), strict=True)).values()) == {True}


def test_states_of_several_shapes_do_not_say_which_is_the_parameters() -> None:
    checkpoint = replace(_checkpoint(), model=None)
    checkpoint.optim.state["net.a.weight"]["row"] = _tensor(5)
    with pytest.raises(NeedsInformationError, match="which states of 1 parameter are sharded") as caught:
        decide_sharded(checkpoint, ShardingHints(), strict=True)
    assert caught.value.details == ("net.a.weight",)
    decided = decide_sharded(checkpoint, ShardingHints(), strict=False).optim.state
    assert [leaf.sharded for leaf in decided["net.a.weight"].values()] == [False] * 3
    assert decided["net.a.bias"]["exp_avg"].sharded is True


def test_what_the_source_says_wins_over_inference() -> None:
    decided = decide_sharded(_checkpoint(sharded=False), ShardingHints(buffers=()), strict=False)
    assert _sharded(decided)["net.a.weight"] is False
    assert decided.optim.state["net.a.weight"]["exp_avg"].sharded is False


def test_a_dcp_target_cuts_what_is_undetermined_and_says_so() -> None:
    decided = decide_sharded(_checkpoint(), ShardingHints(), strict=False)
    assert undetermined(decided) == ["net.running"]
    (note,) = [note for note in note_undetermined(decided).notes if note.kind == "undetermined"]
    assert note.keys == ("net.running",)
    assert note.message == "1 model key may be a parameter or a buffer, and is cut like parameters: net.running"
    both = note_undetermined(decide_sharded(replace(_checkpoint(), optim=None), ShardingHints(), strict=False)).notes
    assert "4 model keys may be parameters or buffers, and are cut" in both[0].message


def test_what_is_undetermined_is_said_under_its_new_name() -> None:
    decided = decide_sharded(_checkpoint(), ShardingHints(), strict=False)
    renamed = rename(decided, strip_prefix=None, add_prefix="model.", pairs=[("net.running", "net.mean")])
    assert undetermined(renamed) == ["model.net.mean"]
    assert note_undetermined(renamed).notes[-1].keys == ("model.net.mean",)


def test_as_many_ids_as_model_tensors_prove_all_of_them_parameters() -> None:
    checkpoint = _checkpoint(ids=True)
    del checkpoint.model.params["net.running"]
    assert set(_sharded(decide_sharded(checkpoint, ShardingHints(), strict=True)).values()) == {True}
    del checkpoint.model.params["head.weight"]
    with pytest.raises(NeedsInformationError):
        decide_sharded(checkpoint, ShardingHints(), strict=True)


def test_a_state_of_another_shape_than_its_parameter_is_whole_on_every_rank() -> None:
    checkpoint = _checkpoint()
    checkpoint.optim.state["net.a.weight"] |= {"row": _tensor(5), "count": _tensor(sharded=True)}
    decided = decide_sharded(checkpoint, ShardingHints(buffers=("net.running",)), strict=True)
    assert decided.optim.state["net.a.weight"]["row"].sharded is False
    assert decided.optim.state["net.a.weight"]["count"].sharded is False
    assert decided.optim.state["net.a.weight"]["exp_avg"].sharded is True
