"""Parameters without optimizer state: named, left, or given zeros in a form that nothing leaves in doubt.

A row is one conversion of a model and of its Adam, keyed by name. A letter is a parameter; c and d are in a module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.ir.files import Zeros
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.missing_state import fill
from tests.flat.flat_synthetic import checkpoint, named, sharded_model, whole
from tests.oracle.compare import identical
from tests.oracle.fake_group import as_rank
from tests.refusals import Refused

SHAPES: dict[str, tuple[int, ...]] = {
    "a": (5, 3),
    "b": (7,),
    "c": (3, 11),
    "d": (2, 2),
    "z": (0, 3),
    "v": (3,),
    "w": (3,),
}
NAMES = {letter: f"q.{letter}" if letter in "cd" else letter for letter in SHAPES}
State = dict[str, dict[str, Any]]
Change = Callable[[dict[str, Any], State], object]
"""Changes the model and the states before they are saved."""


def unchanged(model: dict[str, Any], state: State) -> None:
    pass


@dataclass(frozen=True)
class Row:
    """``groups``: of the optimizer; ``without``: the parameters that have no state; ``units``: the parameters of each
    unit, if a units file is given, and ``frozen`` those that it says are frozen; ``beside``: it lies beside the source.

    ``found``: the parameters that have states afterwards, in order, or how it is refused; ``steps``: of those that got
    zeros, and of others if a row says so.
    """

    found: str | Refused
    without: str = "b"
    groups: str = "ab cd"
    change: Change = unchanged
    units: str = ""
    frozen: str = ""
    beside: bool = False
    model: bool = True
    choice: str = "zeros"
    steps: Mapping[str, float] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def content(row: Row) -> dict[str, Any]:
    """Adam's states, after 3 steps of a and b and 9 of all others."""
    draw = torch.Generator().manual_seed(7)
    letters = row.groups.replace(" ", "")
    model = {NAMES[letter]: torch.randn(SHAPES[letter], generator=draw) for letter in letters}
    state: State = {}
    for letter in letters:
        if letter not in row.without:
            step = torch.tensor(3.0 if letter in "ab" else 9.0)
            moments = {key: torch.rand(SHAPES[letter], generator=draw) for key in ("exp_avg", "exp_avg_sq")}
            state[NAMES[letter]] = {"step": step, **moments, "seen": 5, "mark": None}
    row.change(model, state)
    listed = [[NAMES[letter] for letter in group] for group in row.groups.split(" ")]
    groups = [{"lr": 0.1 * number, "params": names} for number, names in enumerate(listed)]
    optimizer = {"state": state, "param_groups": groups}
    return {"model": model, "optimizer": optimizer} if row.model else {"optimizer": optimizer}


def units_file(row: Row) -> dict[str, Any]:
    """The first of ``units`` is the root."""
    units: list[dict[str, Any]] = []
    for prefix, letters in zip(("", "q"), row.units.split(" "), strict=False):
        params = [
            {"name": NAMES[each], "shape": SHAPES[each], "dtype": "float32", "requires_grad": each not in row.frozen}
            for each in letters
        ]
        units.append({"prefix": prefix, "strategy": "full-shard", "param_dtype": None, "params": params})
    listed = [NAMES[letter] for letter in row.groups.replace(" ", "")]
    return {
        "format": "fsdpckpt-units", "version": 1, "use_orig_params": True, "world_size": None, "shard_size": None,
        "units": units, "unmanaged": [], "shared": [], "parameters": listed, "groups": None,
    }  # fmt: skip


def convert(row: Row, folder: Path, target: str = "out.pt", **more: Any) -> Any:
    source = folder / "run" / "full.pt"
    source.parent.mkdir(exist_ok=True)
    torch.save(content(row), source)
    options = dict(row.options) | more
    if row.units:
        path = folder / ("run/units.json" if row.beside else "told.json")
        path.write_text(json.dumps(units_file(row)))
        options |= {} if row.beside else {"units": path}
    return fsdpckpt.convert(source.parent if row.beside else source, folder / target, **options)


def same_steps(model: dict[str, Any], state: State) -> None:
    for states in state.values():
        states["step"] = torch.tensor(3.0)


def after(first: Change, *more: Change) -> Change:
    return lambda model, state: [change(model, state) for change in (first, *more)]


def of_a(name: str, value: Any) -> Change:
    """Another state of the first parameter, or one less."""

    def change(_: dict[str, Any], state: State) -> None:
        state["a"].update({name: value})
        if value is None:
            del state["a"][name]

    return after(same_steps, change)


def halved(name: str, *, model: bool = True) -> Change:
    """Moments, and perhaps the parameter itself, in bfloat16."""

    def change(weights: dict[str, Any], state: State) -> None:
        states = state.get(NAMES[name], {})
        states.update({key: leaf.bfloat16() for key, leaf in states.items() if key.startswith("exp")})
        if model:
            weights[NAMES[name]] = weights[NAMES[name]].bfloat16()

    return change


def in_doubt(*details: str) -> Refused:
    return Refused(4, "zeros cannot be made", details)


ONE = "abcd"  # one group
OTHERS = "the others of its group"

# fmt: off
ROWS: dict[str, Row] = {
    "zeros in the form of the others of the group": Row("abcd", "bc", steps={"b": 3, "c": 9}),
    "behind the one that the group lists before it": Row(
        "adbc", "ac", "ab cd", change=lambda _, state: state.update(b=state.pop("b")), steps={"a": 3, "c": 9}),
    "behind one that rightly has none": Row("abcd", "zb", "azb cd", units="azb cd", steps={"b": 3}),
    "an entry that is empty": Row("abcd", "", change=lambda _, state: state["b"].clear(), steps={"b": 3}),
    "an optimizer that is complete": Row("abcd", ""),
    "an optimizer without any state": Row("", ONE),
    "steps that differ in the group": Row(in_doubt(f"b: {OTHERS} do not agree on step"), groups=ONE),

    # What the group does not decide
    "other states": Row(
        in_doubt(f"b: {OTHERS} do not have the same states"), groups=ONE, change=of_a("exp_avg_sq", None)),
    "other values": Row(in_doubt(f"b: {OTHERS} do not agree on seen"), groups=ONE, change=of_a("seen", 6)),
    "no other parameter": Row(
        in_doubt(*(f"{name}: no other parameter of its group has states to go by" for name in "ab")), "ab"),
    "other dtypes": Row(
        in_doubt("b: exp_avg has several dtypes in its group: bfloat16, float32",
                 "b: exp_avg_sq has several dtypes in its group: bfloat16, float32"),
        groups=ONE, change=after(same_steps, halved("a", model=False))),
    "the dtype of each parameter": Row(
        "abcd", groups=ONE, change=after(same_steps, halved("c"), halved("b")), steps={"b": 3}),
    "the dtype that all others have": Row("ab", groups="ab", change=halved("a", model=False), steps={"b": 3}),
    "no model": Row(in_doubt("b: its shape is not known"), model=False),
    "no model, and units": Row("abcd", model=False, units="abc d", steps={"b": 3}),

    # Units
    "the others of the flat parameter come before those of the group": Row(
        "abcd", groups=ONE, units="abc d",
        change=lambda _, state: state["q.c"].update(step=torch.tensor(3.0)), steps={"b": 3}),
    "each flat parameter has its own steps": Row(
        "abcd", "bd", ONE, units="ab cd", steps={"b": 3, "d": 9}),
    "a flat parameter without any state takes the form of the group": Row(
        "abcd", "cd", ONE, units="ab cd", steps={"c": 3, "d": 3}),
    "a frozen parameter": Row("acd", units="abcd", frozen="b"),
    "a frozen parameter, where states are required": Row("acd", units="abcd", frozen="b", choice="error"),
    "units beside the source": Row("acd", units="abcd", frozen="b", choice="error", beside=True),

    # Other choices
    "an error names each": Row(
        Refused(3, ["2 parameters have no optimizer state", "--missing-state zeros", "--missing-state skip"],
                ["b", "q.d"]), "bd",
        choice="error"),
    "an error for one": Row(Refused(3, "1 parameter has no optimizer state", "b"), choice="error"),
    "skip leaves them": Row("acd", choice="skip"),
    "skip, and nothing is missing": Row("abcd", "", choice="skip"),
    "an error, and nothing is missing": Row("abcd", "", choice="error"),
    "an error, and nothing has any state": Row("", ONE, choice="error"),
}
# fmt: on


@pytest.mark.parametrize("name", ROWS)
def test_what_becomes_of_parameters_without_state(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    if isinstance(row.found, Refused):
        row.found.by(lambda: convert(row, tmp_path, missing_state=row.choice))
        assert not (tmp_path / "out.pt").exists()
        return
    report = convert(row, tmp_path, missing_state=row.choice)
    source, written = torch.load(tmp_path / "run" / "full.pt"), torch.load(tmp_path / "out.pt")
    source, written = (each.get("optimizer", each) for each in (source, written))
    assert "".join(key[-1] for key in written["state"]) == row.found
    made = [key for key in written["state"] if not source["state"].get(key)]
    notes = {note.kind: note for note in report.notes if note.kind in ("filled", "missing-state")}
    if made:
        count = "1 parameter" if len(made) == 1 else f"{len(made)} parameters"
        assert notes["filled"].message == f"{count} had no optimizer state, and got zeros"
        assert notes["filled"].keys == tuple(made)
    elif row.choice == "skip" and row.without:
        assert notes["missing-state"].keys == tuple(NAMES[letter] for letter in row.without)
    else:
        assert not notes
    model = content(replace(row, model=True))["model"]
    others = {key: states for key, states in source["state"].items() if states}
    for key in made:
        states = written["state"][key]
        assert list(states) == ["step", "exp_avg", "exp_avg_sq", "seen", "mark"]
        assert states["step"].item() == row.steps[key[-1]]
        assert states["step"].dtype == torch.float32
        assert (states["seen"], states["mark"]) == (5, None)
        dtypes = {state["exp_avg"].dtype for state in others.values()}
        dtype = dtypes.pop() if len(dtypes) == 1 else model[key].dtype
        for moment in ("exp_avg", "exp_avg_sq"):
            assert identical(states[moment], torch.zeros(SHAPES[key[-1]], dtype=dtype))
            assert states[moment].dtype == dtype
    for key, states in others.items():
        assert all(
            identical(written["state"][key][each], leaf) if isinstance(leaf, torch.Tensor) else True
            for each, leaf in states.items()
        )
    tensors = [leaf for states in written["state"].values() for leaf in states.values() if hasattr(leaf, "data_ptr")]
    places = [leaf.untyped_storage().data_ptr() for leaf in tensors if leaf.numel()]
    assert len(set(places)) == len(places)  # torch.optim changes states in place: none may share memory


FLAT = {"to": "flattened", "world_size": 2, "unit": ["none"], "use_orig_params": False, "buffers": ["none"]}


def test_flat_parameters_have_all_states_or_none(tmp_path: Path) -> None:
    part = Row("", "bd", ONE, change=same_steps, options=FLAT)
    words = ["All unflattened parameters comprising a single flat", "--missing-state zeros", "--use-orig-params"]
    error = Refused(4, words, ["the root unit: b, q.d"]).by(lambda: convert(part, tmp_path, "flat"))
    assert isinstance(error, ValueError)  # PyTorch's type for it, too
    many = replace(part, groups="abvwcd", without="abvwc")
    Refused(4, details=["the root unit: a, b, v, w and 1 more"]).by(lambda: convert(many, tmp_path, "flat"))
    for row in (replace(part, without=""), replace(part, without=ONE)):
        convert(row, tmp_path, f"flat{row.without}")
    convert(part, tmp_path, "orig", **{**FLAT, "use_orig_params": True})
    convert(part, tmp_path, "filled", missing_state="zeros", key_type="id")
    assert fsdpckpt.verify(tmp_path / "filled").whole


@pytest.mark.parametrize("target", [{"container": "torch"}, {"container": "dcp"}], ids=str)
def test_zeros_are_cut_as_their_parameter_is_and_read_back_as_zeros(target: dict[str, Any], tmp_path: Path) -> None:
    row = Row("", "c", change=same_steps, options={"missing_state": "zeros"})
    convert(row, tmp_path)
    convert(row, tmp_path, "ranks", to="sharded", world_size=2, verify="full", **target)
    assert fsdpckpt.diff(tmp_path / "out.pt", tmp_path / "ranks").same
    if target["container"] == "torch":
        with as_rank(1, 2):
            states = torch.load(tmp_path / "ranks/optim_world_size_2_rank_1.pt", weights_only=False)["state"]["q.c"]
            assert states["exp_avg"].to_local().shape == (1, 11)


@pytest.mark.parametrize(
    ("of_state", "of_param", "units", "expected"),
    [
        (True, False, None, False),
        (False, True, None, True),
        (True, None, None, True),
        (False, None, None, False),
        (True, True, "of all", True),
        (True, True, "without b", False),
    ],
)
def test_a_made_state_is_sharded_as_its_parameter_is_and_else_as_the_others_states_or_as_units_say(
    of_state: bool | None, of_param: bool | None, units: str | None, expected: bool
) -> None:
    params = [named("a", 5, 3, sharded=of_param), named("b", 5, sharded=of_param)]
    optim = Optimizer.of({"a": {"exp_avg": whole(5, 3, sharded=of_state)}}, [{"params": ["a", "b"]}])
    held = checkpoint(1, model=sharded_model(params) if units is None else None, optim=optim)
    unmanaged = ["b"] if units == "without b" else []
    given = build_units(params, ("",), Settings(use_orig_params=True), unmanaged=unmanaged) if units else None
    found = fill(held, "zeros", read=lambda _: b"", units=given).optim
    leaf = found.state["b"]["exp_avg"]
    assert (leaf.shape, leaf.sharded) == ((5,), expected)


def test_a_state_of_another_shape_than_its_parameter_is_no_example() -> None:
    """A conversion refuses it before."""
    optim = Optimizer.of({"a": {"exp_avg": whole(4, 4)}}, [{"params": ["a", "b"]}])
    held = checkpoint(1, model=sharded_model([named("a", 5, 3), named("b", 5)]), optim=optim)
    details = ["b: the state exp_avg of a does not have the shape of its parameter"]
    Refused(4, details=details).by(lambda: fill(held, "zeros", read=lambda _: b""))


def test_no_two_tensors_of_zeros_share_bytes() -> None:
    """They would be one tied tensor to whoever looks at places."""
    params = [named("a", 5, 3), named("b", 5), named("c", 17)]
    own = {"exp_avg": whole(5, 3), "exp_avg_sq": whole(5, 3, offset=64)}
    optim = Optimizer.of({"a": dict(own)}, [{"params": ["a", "b", "c"]}])
    found = fill(checkpoint(1, model=sharded_model(params), optim=optim), "zeros", read=lambda _: b"")
    assert found.optim is not None
    made = [leaf for name in "bc" for leaf in found.optim.state[name].values() if isinstance(leaf, Tensor)]
    places = [(int(leaf.chunks.offset[0]), leaf.nbytes) for leaf in made]
    assert len(places) == 4
    assert all(begin + nbytes <= following for (begin, nbytes), (following, _) in pairwise(places))
    assert [begin % 64 for begin, _ in places] == [0] * 4
    assert found.files[-1].nbytes >= sum(places[-1])


def test_ids_keep_counting_over_what_has_no_state(tmp_path: Path) -> None:
    convert(Row("", "bd"), tmp_path, "ids.pt", key_type="id")
    for choice, expected in (("zeros", [0, 1, 2, 3]), ("skip", [0, 2])):
        target = tmp_path / f"{choice}.pt"
        fsdpckpt.convert(tmp_path / "ids.pt", target, missing_state=choice)  # type: ignore[arg-type]
        assert list(torch.load(target)["optimizer"]["state"]) == expected


def test_real_adam_goes_on_from_zeros(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({"a": nn.Linear(5, 3, bias=False), "b": nn.Linear(7, 3, bias=False)})
    optimizer = torch.optim.Adam(model.parameters())
    model["a"](torch.randn(2, 5)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "s.pt")
    fsdpckpt.convert(tmp_path / "s.pt", tmp_path / "t.pt", missing_state="zeros")
    optimizer.load_state_dict(torch.load(tmp_path / "t.pt")["optimizer"])
    model["b"](torch.randn(2, 7)).sum().backward()
    optimizer.step()
    assert float(optimizer.state[model["b"].weight]["step"]) == 2.0


@pytest.mark.parametrize("shape", [(), (2, 3)], ids=str)
def test_moments_of_a_parameter_without_dimensions_are_not_those_of_others(shape: Any, tmp_path: Path) -> None:
    model = nn.ParameterDict({name: nn.Parameter(torch.rand(())) for name in ("a", "c")} | {"d": torch.rand(2, 3)})
    model["b"] = nn.Parameter(torch.rand(shape))
    optimizer = torch.optim.AdamW([{"params": [model["a"], model["b"]]}, {"params": [model["c"], model["d"]]}])
    (model["a"] + model["c"] + model["d"].sum()).square().backward()
    optimizer.step()
    saved, names = optimizer.state_dict(), ["a", "b", "c", "d"]
    state = {names[number]: states for number, states in saved["state"].items()}
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in saved["param_groups"]]
    content = {"model": model.state_dict(), "optimizer": {"state": state, "param_groups": groups}}
    torch.save(content, tmp_path / "s.pt")
    fsdpckpt.convert(tmp_path / "s.pt", tmp_path / "t.pt", missing_state="zeros")
    made = torch.load(tmp_path / "t.pt")["optimizer"]["state"]["b"]
    expected = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape)}
    torch.testing.assert_close(made, expected, rtol=0, atol=0)
    for removed in (state, content["model"]):
        del removed["c"], removed["d"]  # type: ignore[attr-defined]  # what shows which states have dimensions
    del groups[1]
    torch.save(content, tmp_path / "s.pt")
    Refused(4, "have no dimensions, so exp_avg may be one value").by(
        lambda: fsdpckpt.convert(tmp_path / "s.pt", tmp_path / "u.pt", missing_state="zeros")
    )


def test_the_file_of_zeros_reads_as_zeros_anywhere_and_of_any_length() -> None:
    with Sources() as sources:
        source = sources.open_file(Zeros(1))
        assert source.read(1 << 60, 3) == b"\0\0\0"
        buffer = bytearray(b"\x07" * 2_500_001)
        source.read_into(5, memoryview(buffer))
        assert not any(buffer)
