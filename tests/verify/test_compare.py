"""Two checkpoints are the same when every key, shape, dtype, byte and value is, whatever the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceIncompleteError
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Section
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.compare import compare, only_section
from fsdpckpt.verify.difference import Difference
from fsdpckpt.verify.elements import Tolerance
from tests.ir.checkpoints import with_origin
from tests.ir.optimizers import with_setting, without_entry
from tests.verify.raw import Raw, numbers, random_array, rows


def difference(a: Checkpoint, b: Checkpoint, tolerance: Tolerance | None = None) -> Difference:
    with Sources() as sources:
        return compare(a, b, sources=sources, tolerance=tolerance)


def changed(result: Difference) -> dict[str, tuple[str, str]]:
    return {entry.key: (entry.sigil, entry.detail) for entry in result.entries if entry.sigil != "="}


def one(directory: Path, array: np.ndarray, ranks: int = 1, order: tuple[int, ...] | None = None) -> Checkpoint:
    raw = Raw(directory, ranks)
    return raw.checkpoint({"w": raw.put(array, rows(array.shape, ranks), order=order)})


def test_the_same_bytes_in_other_cuts_and_orders_are_the_same(tmp_path: Path) -> None:
    array = random_array(1, (13, 7))  # with NaN among them
    left = one(tmp_path / "a", array, 3)
    for name, ranks, order in (("b", 1, None), ("c", 5, (1, 0)), ("d", 4, None)):
        assert difference(left, one(tmp_path / name, array, ranks, order)).same


def test_one_flipped_bit_is_counted_located_and_measured(tmp_path: Path) -> None:
    array = numbers(2, (13, 7))
    other = array.copy()
    other[9, 4] += 0.5
    other[12, 6] += 2.0
    result = difference(one(tmp_path / "a", array, 2), one(tmp_path / "b", other, 3))
    assert changed(result) == {"w": ("*", "2 of 91 elements differ, first at [9, 4], by up to 2")}
    assert not result.same
    assert (result.count("*"), result.count("=")) == (1, 0)


@pytest.mark.parametrize(
    ("tolerance", "same"), [(None, False), (Tolerance(1e-3), True), (Tolerance(1e-6), False), (Tolerance(0, 0.1), True)]
)
def test_tolerances_are_those_of_torch_allclose(tmp_path: Path, tolerance: Tolerance | None, same: bool) -> None:
    array = numbers(3, (50,), "float32") + np.float32(10)
    other = array * np.float32(1.0001)
    assert difference(one(tmp_path / "a", array), one(tmp_path / "b", other), tolerance).same is same


@pytest.mark.parametrize(
    ("a", "b", "bytes_differ", "differs_by_1"),
    [
        ([0.0, 1.0], [-0.0, 1.0], "1 of 2 elements differ, first at [0], by up to 0", None),
        (
            [np.inf, np.nan, np.inf],
            [np.inf, -np.nan, -np.inf],
            "2 of 3 elements differ, first at [1], by up to inf",
            "1 of 3 elements differ, first at [2], by up to inf",
        ),
    ],
)
def test_zeros_infinities_and_nan_by_bytes_and_within_a_tolerance(
    tmp_path: Path, a: list[float], b: list[float], bytes_differ: str, differs_by_1: str | None
) -> None:
    left, right = one(tmp_path / "a", np.float32(a)), one(tmp_path / "b", np.float32(b))
    for tolerance, said in ((None, bytes_differ), (Tolerance(1.0, 1.0), differs_by_1)):
        assert changed(difference(left, right, tolerance)) == ({} if said is None else {"w": ("*", said)})
    assert difference(left, right, Tolerance()).same is (differs_by_1 is None)


SPECIAL = (float("nan"), float("inf"), float("-inf"), 0.0, 1.0, 50.0)
PAIRS = [(a, b) for a in SPECIAL for b in SPECIAL]


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_the_parts_of_complex_numbers_are_compared_as_real_numbers_are(tmp_path: Path, dtype: str) -> None:
    """A NaN in one part says nothing about the other one."""
    real = one(tmp_path / "real", np.array([a for a, _ in PAIRS])), one(tmp_path / "r", np.array([b for _, b in PAIRS]))
    unlike = [(a, b) for a, b in PAIRS if not (a == b or (np.isnan(a) and np.isnan(b)))]
    tolerance = Tolerance(0.1, 0.1)
    assert changed(difference(*real, tolerance))["w"][1].startswith(f"{len(unlike)} of {len(PAIRS)} elements differ")
    for part in ("real", "imag"):
        arrays = [np.full(len(PAIRS), complex(np.nan, np.nan), dtype) for _ in range(2)]
        for array, numbers_of_it in zip(arrays, zip(*PAIRS, strict=True), strict=True):
            setattr(array, part, numbers_of_it)
            other = "imag" if part == "real" else "real"
            setattr(array, other, np.resize([np.nan, 3.0, np.inf], len(PAIRS)))
        left, right = one(tmp_path / f"{part}-a", arrays[0]), one(tmp_path / f"{part}-b", arrays[1])
        assert difference(left, left, tolerance).same and difference(left, left).same
        text = changed(difference(left, right, tolerance))["w"][1]
        assert text.startswith(f"{len(unlike)} of {len(PAIRS)} elements differ"), text


@pytest.mark.parametrize(
    ("dtype", "a", "b", "distance"),
    [
        ("int64", [2**53, 1], [2**53 + 1, 1], "1"),
        ("int64", [-(2**63), 1], [2**63 - 1, 1], "1.84e+19"),
        ("uint64", [2**64 - 1, 1], [2**64 - 2, 1], "1"),
        ("int8", [-128, 1], [127, 1], "255"),
    ],
)
def test_integers_are_compared_exactly(tmp_path: Path, dtype: str, a: list[int], b: list[int], distance: str) -> None:
    left, right = one(tmp_path / "a", np.array(a, dtype)), one(tmp_path / "b", np.array(b, dtype))
    expected = {"w": ("*", f"1 of 2 elements differ, first at [0], by up to {distance}")}
    assert changed(difference(left, right)) == expected
    assert changed(difference(left, right, Tolerance())) == expected
    assert difference(left, right, Tolerance(rtol=4.0)).same


def test_keys_with_the_same_dotted_text_are_different_keys(tmp_path: Path) -> None:
    def extras(number: int) -> Checkpoint:
        extra = {0: number, "0": 2, "a.b": number, "a": {"b": 2}}
        optim = Optimizer.of({}, [{"params": [], "settings": {0: number, "0": 2}}], {"c.d": number, "c": {"d": 2}})
        return Raw(tmp_path / str(number), 1).checkpoint(None, optim, extra, [{"e.f": number, "e": {"f": 2}}])

    result = difference(extras(1), extras(5))
    keys = ["param_groups.0.settings.0", "c.d", "0", "a.b", "rank0.e.f"]
    assert [(entry.sigil, entry.key) for entry in result.entries if entry.sigil != "="] == [("*", key) for key in keys]
    assert (result.count("="), difference(extras(1), extras(1)).same) == (6, True)


def test_shape_and_dtype_are_told_and_no_data_is_read(tmp_path: Path) -> None:
    raw = Raw(tmp_path / "a", 1)
    left = raw.checkpoint({"w": raw.put(random_array(4, (3, 4))), "v": raw.put(random_array(5, (6,)))})
    other = Raw(tmp_path / "b", 1)
    right = other.checkpoint(
        {
            "w": other.put(random_array(4, (4, 3))),
            "v": other.put(random_array(5, (6,), "bfloat16"), dtype=DTYPES["bfloat16"]),
        }
    )
    (tmp_path / "b" / "rank_0.bin").unlink()
    assert changed(difference(left, right)) == {
        "w": ("*", "shape [3, 4] vs [4, 3]"),
        "v": ("*", "dtype float32 vs bfloat16"),
    }


def test_keys_of_one_side_are_told_with_what_they_are(tmp_path: Path) -> None:
    array = random_array(6, (2, 2))
    raw = Raw(tmp_path / "a", 1)
    left = raw.checkpoint({"same": raw.put(array), "gone": raw.put(array)}, extra={"epoch": 3})
    other = Raw(tmp_path / "b", 1)
    right = other.checkpoint({"new": other.put(array), "same": other.put(array)}, extra={"epoch": 4, "lr": None})
    result = difference(left, right)
    assert [(entry.sigil, entry.section, entry.key, entry.detail) for entry in result.entries] == [
        ("=", Section.MODEL, "same", ""),
        ("-", Section.MODEL, "gone", "tensor float32 [2, 2]"),
        ("*", Section.EXTRA, "epoch", "3 vs 4"),
        ("+", Section.MODEL, "new", "tensor float32 [2, 2]"),
        ("+", Section.EXTRA, "lr", "None"),
    ]


def optimizer(
    directory: Path, keys: list[int | str], groups: list[list[int | str]], *, rows: int = 0, **hyper: object
) -> Checkpoint:
    """The n-th key in the order of the groups has the n-th shape, or this many ``rows``, and values."""
    raw = Raw(directory, 2)
    order = [key for group in groups for key in group]
    state = {
        key: {
            "step": raw.put(np.float32(7)),
            "exp_avg": raw.put(
                random_array(order.index(key), (rows or order.index(key) + 2, 3)), ranks=[order.index(key) % 2]
            ),
        }
        for key in keys
    }
    param_groups = [{"lr": 0.1, "betas": (0.9, 0.95), **hyper, "params": list(group)} for group in groups]
    return raw.checkpoint(optim=Optimizer.of(state, param_groups))


@pytest.mark.parametrize(
    ("listed", "same"),
    [([["b", "a"], ["c"]], True), ([["a", "c"], ["b"]], False), ([["b", "a", "a"], ["c"]], False)],
)
def test_groups_may_list_the_same_names_in_another_order(listed: list[list[str]], same: bool, tmp_path: Path) -> None:
    """Flattening lists them in the model's. A name in another group, or twice, is a difference."""
    left, right = (optimizer(tmp_path / name, ["a", "b", "c"], [["a", "b"], ["c"]]) for name in ("left", "right"))
    for number, names in enumerate(listed):
        right.optim = with_setting(right.optim, number, params=list(names))
    result = difference(left, right)
    assert result.same is same
    assert bool(result.notes) is same


def model_of(optim: Checkpoint, names: Sequence[str], order: Sequence[str]) -> ModelState:
    """The model of ``optim``, whose parameters have these ``names`` in the order of its ids, listed in ``order``."""
    keys = optim.optim.all_keys() if isinstance(optim.optim.all_keys()[0], str) else range(len(names))
    states = dict(zip(names, keys, strict=True))
    return ModelState({name: optim.optim.state[states[name]]["exp_avg"] for name in order})


class Matching(NamedTuple):
    """Ids in ``groups``, and the ``names`` of the same parameters in theirs; ``listed``: as the file has these.

    ``model``: its names, in its order, beside the ids (or the names, if ``of_names``). ``frozen``: parameters without
    states. ``rows``: of every parameter, else each has its own. ``said``: in the note, or in what is refused.
    """

    groups: list[list[int]]
    names: list[list[str]]
    said: str
    same: bool = True
    listed: list[list[str]] | None = None
    model: Sequence[str] = ()
    of_names: bool = False
    frozen: Sequence[str] = ()
    rows: int = 0


BY_GROUPS, BY_MODEL, BY_SHAPES = (
    "the order of the param groups",
    "the model's parameters",
    "by the shapes of their states",
)
APART = ["l.b.w", "l.a.w", "m.w"]
MATCHINGS = {
    "in the order of the groups": Matching([[0, 1], [2]], [["c", "a"], ["b"]], BY_GROUPS),
    # As a script wrote it, of l, of m, and of l again: the optimizer's own list counts.
    "a model in an order that no module has": Matching(
        [[0, 1, 2]], [APART], BY_GROUPS, model=["l.b.w", "m.w", "l.a.w"], rows=2
    ),
    "a list in another order": Matching(
        [[0, 1, 2]], [["a", "b", "c"]], "shapes", same=False, listed=[["c", "a", "b"]]
    ),
    "a list in another order than the model": Matching(
        [[0, 1, 2]], [["a", "b", "c"]], BY_MODEL, listed=[["c", "a", "b"]], model="abc"
    ),
    # The states of a frozen parameter, which has none, fit every order: FSDP sorts names, ids count in the model's.
    "frozen parameters": Matching(
        [[0, 1, 2]], [["c", "a", "b"]], "", listed=[["a", "b", "c"]], model="cab", frozen=["a", "b"]
    ),
    "other shapes": Matching([[0, 1], [2]], [["c", "a"], ["b"]], "shapes", same=False, listed=[["c", "b"], ["a"]]),
    "other groups": Matching([[0, 1], [2]], [["c", "a"], ["b"]], "2+1 and 1+2", same=False, listed=[["a"], ["b", "c"]]),
    "fewer groups": Matching([[0, 1], [2]], [["c", "a"], ["b"]], "2+1 and 3", same=False, listed=[["a", "b", "c"]]),
    # As ``convert`` has it: shapes decide, or the order is asked for, and given.
    "sorted names of own shapes": Matching([[0, 1], [2]], [["c", "a"], ["b"]], BY_SHAPES, listed=[["a", "c"], ["b"]]),
    "sorted names of equal shapes": Matching(
        [[0, 1], [2]], [["c", "a"], ["b"]], "which id is which name", same=False, listed=[["a", "c"], ["b"]], rows=3
    ),
    # ``FSDP.rekey_optim_state_dict`` sorts: only the model of the names says how ids count.
    "sorted names beside their model": Matching(
        [[0, 1, 2]], [["c", "a", "b"]], "", listed=[["a", "b", "c"]], model="cab", of_names=True, rows=2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MATCHINGS)
def test_ids_and_names_are_matched_by_what_proves_an_order_or_refused(name: str, tmp_path: Path) -> None:
    one = MATCHINGS[name]
    own = [each for group in one.names for each in group]
    ids = optimizer(tmp_path / "ids", [*range(len(own))], one.groups, rows=one.rows)
    names = optimizer(tmp_path / "names", sorted(own), one.names, rows=one.rows)
    if one.model:
        side, keys = (names, sorted(own)) if one.of_names else (ids, own)
        side.model = model_of(side, keys, one.model)
    for frozen in one.frozen:
        ids.optim = without_entry(ids.optim, own.index(frozen))
        names.optim = without_entry(names.optim, frozen)
    if one.listed is not None:
        names.optim = names.optim.with_groups([{**names.optim.param_groups[0], "params": each} for each in one.listed])
    ids, names = (only_section(each, Section.OPTIM) if each.model is None else each for each in (ids, names))
    if one.of_names:
        ids = only_section(ids, Section.OPTIM)
    for pair in ((ids, names), (names, ids)):
        if not one.same:
            with pytest.raises(NeedsInformationError) as asked:
                difference(*pair)
            assert pair[0] is names or one.said in asked.value.text
            assert asked.value.next_step is not None and (not one.rows or "--parameters" in asked.value.next_step)
            continue
        result = difference(*pair)
        entries = {entry.key: entry.sigil for entry in result.entries if entry.section is Section.OPTIM}
        assert {*entries.values()} == {"="} and entries.keys() >= {f"param_groups.{len(one.groups) - 1}.params"}
        keys = own if pair[0] is names else range(len(own))
        assert {
            f"{key}.exp_avg" for key, each in zip(keys, own, strict=True) if each not in one.frozen
        } <= entries.keys()
        assert one.said in "".join(result.notes)


def test_without_groups_ids_and_names_cannot_be_matched(tmp_path: Path) -> None:
    ids, names = optimizer(tmp_path / "a", [0], [[0]]), optimizer(tmp_path / "b", ["w"], [["w"]])
    names.optim = replace(names.optim, groups=None)
    with pytest.raises(NeedsInformationError, match="no param groups"):
        difference(ids, names)
    assert difference(only_section(ids, Section.MODEL), only_section(names, Section.MODEL)).same


def test_ids_that_became_strings_are_matched_in_order_and_said_so(tmp_path: Path) -> None:
    ids, damaged = optimizer(tmp_path / "a", [0, 1], [[0, 1]]), optimizer(tmp_path / "b", ["0", "1"], [["0", "1"]])
    result = difference(ids, damaged)
    assert (result.same, len(result.notes)) == (True, 1)


def test_hyper_parameters_are_compared_in_type_and_value(tmp_path: Path) -> None:
    left = optimizer(tmp_path / "a", ["w"], [["w"]], fused=None, eps=1e-8, nan=float("nan"))
    right = optimizer(tmp_path / "b", ["w"], [["w"]], fused=False, eps=1e-8, nan=float("nan"))
    right.optim = with_setting(right.optim, 0, betas=[0.9, 0.95])
    assert changed(difference(left, right)) == {
        "param_groups.0.betas": ("*", "(0.9, 0.95) vs [0.9, 0.95]"),
        "param_groups.0.fused": ("*", "None vs False"),
    }


def test_keys_of_dicts_in_groups_that_became_text_are_no_difference(tmp_path: Path) -> None:
    """A DCP directory has keys as text, in groups as in extras and in the states of parameters."""
    left = optimizer(tmp_path / "a", ["w"], [["w"]], schedule={None: 1, 2: [{3: 4}]}, cycle=[{5: (6, 7)}])
    right = optimizer(tmp_path / "b", ["w"], [["w"]], schedule={"None": 1, "2": [{"3": 4}]}, cycle=[{"5": (6, 8)}])
    assert changed(difference(left, right)) == {"param_groups.0.cycle.0.5.1": ("*", "7 vs 8")}


def test_a_tensor_learning_rate_is_compared_as_a_tensor(tmp_path: Path) -> None:
    def made(name: str, rate: float) -> Checkpoint:
        raw = Raw(tmp_path / name, 1)
        return raw.checkpoint(optim=Optimizer.of({}, [{"lr": raw.put(np.float32(rate)), "params": ["w"]}]))

    assert difference(made("a", 0.5), made("b", 0.5)).same
    assert changed(difference(made("c", 0.5), made("d", 0.25))).keys() == {"param_groups.0.lr"}


def test_extras_of_each_rank_are_compared_by_rank(tmp_path: Path) -> None:
    raw = Raw(tmp_path, 1)
    left = raw.checkpoint({}, rank_extra=[{"rng": b"\x01"}, {"rng": b"\x02"}])
    right = raw.checkpoint({}, rank_extra=[{"rng": b"\x01"}, {"rng": b"\x03"}])
    assert changed(difference(left, right)).keys() == {"rank1.rng"}


def test_random_states_of_the_only_rank_are_those_of_rank_0(tmp_path: Path) -> None:
    raw = Raw(tmp_path, 1)
    alone = with_origin(raw.checkpoint({}, extra={"random_states_0": {"step": 3}}), flavor="accelerate")
    ranks: list[dict[Key, Value]] = [{"random_states": {"step": 3}}] * 2
    both = with_origin(raw.checkpoint({}, extra=ranks[0], rank_extra=ranks), flavor="accelerate")
    assert difference(alone, both).same and difference(both, alone).same
    later = with_origin(raw.checkpoint({}, extra={"random_states_0": {"step": 4}}), flavor="accelerate")
    counted = [entry.key for entry in difference(later, both).entries if entry.sigil != "=" and entry.counts]
    assert counted == ["random_states.step"]
    plain = [with_origin(each, flavor="plain") for each in (alone, both)]
    assert not difference(*plain).same, "whose file this is, is not known"


@pytest.mark.parametrize(("rng", "same"), [({"seed": 7}, True), ({"cpu": 1, "numpy": 2, "random": 3}, False)])
def test_an_extra_whose_name_the_framework_has_for_something_else_cannot_be_kept(
    rng: dict[Key, Value], same: bool, tmp_path: Path
) -> None:
    raw = Raw(tmp_path, 1)
    left = with_origin(raw.checkpoint({}, extra={"rng": rng}), flavor="verl")
    right = with_origin(raw.checkpoint({}), flavor="verl")
    assert difference(left, right).same is same and difference(right, left).same is same
    with Sources() as sources:
        assert not compare(left, right, sources=sources, strict=True).same


def test_weights_for_hugging_face_have_no_optimizer_no_extras_and_tied_weights_once(tmp_path: Path) -> None:
    embed, other = random_array(11, (5, 3)), random_array(12, (5, 3))
    raw, exported = Raw(tmp_path / "a", 1), Raw(tmp_path / "b", 1)
    optim = Optimizer.of({"embed": {"exp_avg": raw.put(embed)}}, [{"lr": 0.1, "params": ["embed"]}])
    left = raw.checkpoint({"embed": raw.put(embed), "head": raw.put(embed)}, optim, {"epoch": 3})
    right = exported.checkpoint({"embed": exported.put(embed)})
    assert not difference(left, right).same
    right = with_origin(right, flavor="huggingface")
    assert difference(left, right).same
    with Sources() as sources:
        assert not compare(left, right, sources=sources, strict=True).same
    left.model.params["lost"] = raw.put(other)
    left = raw.checkpoint(left.model.params, optim, {"epoch": 3})
    result = difference(left, right)
    assert [(entry.sigil, entry.key) for entry in result.entries if entry.counts and entry.sigil != "="] == [
        ("-", "lost")
    ]
    right = with_origin(right, flavor="trainer")  # which keeps an optimizer
    assert difference(left, right).count("-") == 2 + 3


def test_a_tensor_that_is_not_whole_is_an_error(tmp_path: Path) -> None:
    raw = Raw(tmp_path / "a", 2)
    array = random_array(8, (4, 2))
    part = raw.checkpoint({"w": raw.put(array, [((0, 0), (2, 2))])})
    with pytest.raises(SourceIncompleteError):
        difference(part, one(tmp_path / "b", array))


def test_a_group_without_parameters_that_flattened_keys_cannot_hold_is_noted_and_no_difference(tmp_path: Path) -> None:
    """The HF Trainer makes one for the parameters without weight decay, even if there are none (LoRA)."""
    model = {"l.a": torch.rand(3, 2), "l.b": torch.rand(2, 3)}
    state = {name: {"step": torch.tensor(3.0), "exp_avg": torch.rand_like(weight)} for name, weight in model.items()}
    groups = [{"lr": 0.1, "params": list(model)}, {"lr": 0.1, "params": []}]
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "full.pt")
    options: dict[str, Any] = {"flavor": "torchtitan", "world_size": 2, "buffers": ["none"]}
    report = fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "out", **options)
    assert any(note.message.startswith("param group 1 lists no parameter") for note in report.notes)
    for pair in (("full.pt", "out"), ("out", "full.pt")):
        found = fsdpckpt.diff(*(tmp_path / name for name in pair))
        assert found.same, found
        assert not fsdpckpt.diff(*(tmp_path / name for name in pair), strict=True).same
    groups[1]["params"] = [groups[0]["params"].pop()]  # type: ignore[attr-defined]
    groups[1]["lr"] = 0.2
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "full.pt")
    assert not fsdpckpt.diff(tmp_path / "full.pt", tmp_path / "out").same
