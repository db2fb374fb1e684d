"""Parameters without optimizer state: named, left, or given zeros in a form that nothing leaves in doubt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.converters.steps.fill import fill_missing
from fsdpckpt.errors import NeedsInformationError, SourceIncompleteError
from fsdpckpt.execute.job import Budget
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Zeros
from fsdpckpt.ir.invariants import problems
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.units import Unit, Units
from fsdpckpt.plan import make_plan
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.local import ZeroFile
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.missing_state import require_complete
from fsdpckpt.verify.elements import first_difference
from fsdpckpt.writers import DtypeRule, WriteSpec
from fsdpckpt.writers.dcp import lay_out as lay_out_dcp
from fsdpckpt.writers.torch_full import lay_out
from tests.execute.running import run_plan

NAMES = ("a", "b", "c", "d")


def _content(**without: Any) -> dict[str, Any]:
    """A model of four parameters in two groups, and Adam's states by name of those that are not in ``without``."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"a": (5, 3), "b": (7,), "c": (3, 11), "d": (2, 2)}
    model = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    state = {
        name: {
            "step": torch.tensor(3.0 if name in "ab" else 9.0),
            "exp_avg": torch.randn(shape, generator=generator),
            "exp_avg_sq": torch.rand(shape, generator=generator),
            "seen": 5,
            "mark": None,
        }
        for name, shape in shapes.items()
        if name not in without
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.5), "params": ["a", "b"]}, {"lr": 0.2, "params": ["c", "d"]}]
    return {"model": model, "optimizer": {"state": state, "param_groups": groups}}


def _save(path: Path, content: dict[str, Any]) -> str:
    torch.save(content, path)
    return str(path)


def _units(**trained: bool) -> Units:
    shapes = {"a": (5, 3), "b": (7,), "c": (3, 11), "d": (2, 2)}
    params = [
        Parameter(name, shape, DTYPES["float32"], requires_grad=trained.get(name, True))
        for name, shape in shapes.items()
    ]
    return Units((Unit("", tuple(params[:3])), Unit("deep", tuple(params[3:]))), False, NAMES)


def _filled(path: str, choice: Any, units: Units | None = None) -> Checkpoint:
    with Sources() as sources:
        opened = open_checkpoint(path, sources=sources, locate=Locate.ALL)
        return fill_missing(opened, choice, units=units, sources=sources)


def test_error_names_every_parameter_without_state(tmp_path: Path) -> None:
    source = _save(tmp_path / "s.pt", _content(b=0, d=0))
    with pytest.raises(SourceIncompleteError) as error:
        _filled(source, "error")
    assert error.value.details == ("b", "d") and "--missing-state zeros" in error.value.next_step
    assert error.value.exit_code == 3


def test_skip_leaves_them_and_says_so(tmp_path: Path) -> None:
    found = _filled(_save(tmp_path / "s.pt", _content(b=0)), "skip")
    assert list(found.optim.state) == ["a", "c", "d"] and found.notes[-1].keys == ("b",)


@pytest.mark.parametrize("choice", ["error", "zeros", "skip"])
def test_a_complete_optimizer_and_one_without_any_states_stay_as_they_are(choice: str, tmp_path: Path) -> None:
    for number, content in enumerate((_content(), _content(a=0, b=0, c=0, d=0))):
        path = _save(tmp_path / f"{number}.pt", content)
        with Sources() as sources:
            opened = open_checkpoint(path, sources=sources, locate=Locate.ALL)
            assert fill_missing(opened, choice, units=None, sources=sources) is opened


def _write(checkpoint: Checkpoint, directory: Path, *, dcp: bool, window: int = 4096) -> str:
    """``checkpoint`` as one torch file, or as a DCP directory of 3 ranks."""
    rule = DtypeRule()
    target = (
        lay_out_dcp(checkpoint, WriteSpec(world_size=3, dtypes=rule))
        if dcp
        else lay_out(checkpoint, WriteSpec(dtypes=rule, path="o.pt"))
    )
    with Sources() as sources:
        run_plan(
            make_plan(target),
            files=checkpoint.files,
            checksums=checkpoint.checksums,
            sources=sources,
            locate=lambda path: str(directory / path),
            budget=Budget(window=window, threads=2),
        )
    return str(directory if dcp else directory / "o.pt")


def test_zeros_are_written_in_the_form_of_the_groups_other_states(tmp_path: Path) -> None:
    content = _content(b=0, c=0)
    found = _filled(_save(tmp_path / "s.pt", content), "zeros")
    assert problems(found) == [] and isinstance(found.files[-1], Zeros)
    assert found.notes[-1].kind == "filled" and found.notes[-1].keys == ("b", "c")
    (tmp_path / "out").mkdir()
    written = torch.load(_write(found, tmp_path / "out", dcp=False), weights_only=True)["optimizer"]
    assert list(written["state"]) == ["a", "b", "c", "d"]
    for name, like, shape in (("b", "a", (7,)), ("c", "d", (3, 11))):
        made = written["state"][name]
        assert list(made) == ["step", "exp_avg", "exp_avg_sq", "seen", "mark"]
        assert torch.equal(made["exp_avg"], torch.zeros(shape)) and torch.equal(made["exp_avg_sq"], torch.zeros(shape))
        assert made["step"] == content["optimizer"]["state"][like]["step"] and made["step"].dtype == torch.float32
        assert (made["seen"], made["mark"]) == (5, None)
    places = [
        state[name].untyped_storage().data_ptr() for state in written["state"].values() for name in list(state)[:3]
    ]
    assert len(set(places)) == len(places)  # torch.optim changes states in place: none may share memory
    for name in ("a", "d"):
        for state, value in content["optimizer"]["state"][name].items():
            kept = written["state"][name][state]
            assert torch.equal(kept, value) if isinstance(value, torch.Tensor) else kept == value


def test_real_adam_goes_on_from_zeros(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.ModuleDict({name: nn.Linear(size, 3, bias=False) for name, size in zip("ab", (5, 7), strict=True)})
    optimizer = torch.optim.Adam(model.parameters())
    model["a"](torch.randn(2, 5)).sum().backward()
    optimizer.step()
    by_name = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    by_name = {
        "state": {names[key]: value for key, value in by_name["state"].items()},
        "param_groups": [{**by_name["param_groups"][0], "params": names}],
    }
    assert list(by_name["state"]) == ["a.weight"]
    found = _filled(_save(tmp_path / "s.pt", {"model": model.state_dict(), "optimizer": by_name}), "zeros")
    (tmp_path / "out").mkdir()
    written = torch.load(_write(found, tmp_path / "out", dcp=False), weights_only=True)["optimizer"]
    optimizer.load_state_dict(
        {
            "state": dict(enumerate(written["state"].values())),
            "param_groups": [{**written["param_groups"][0], "params": [0, 1]}],
        }
    )
    model["b"](torch.randn(2, 7)).sum().backward()
    optimizer.step()
    assert float(optimizer.state[model["b"].weight]["step"]) == 2.0


def test_zeros_in_a_dcp_directory_read_back_as_zeros(tmp_path: Path) -> None:
    source = _save(tmp_path / "s.pt", _content(c=0))
    found = _filled(source, "zeros")
    for states in found.optim.state.values():
        for name, leaf in states.items():
            if name.startswith("exp"):
                object.__setattr__(leaf, "sharded", True)
    (tmp_path / "out").mkdir()
    path = _write(found, tmp_path / "out", dcp=True, window=64)
    with Sources() as sources:
        written = open_checkpoint(path, sources=sources, locate=Locate.ALL)
        assert problems(written) == []
        for param, states in found.optim.state.items():
            for name in ("step", "exp_avg", "exp_avg_sq"):
                mine = (states[name], found.files, sources)
                assert first_difference(mine, (written.optim.state[param][name], written.files, sources), None) is None


def test_steps_that_differ_inside_the_group_make_nothing(tmp_path: Path) -> None:
    content = _content(b=0)
    content["optimizer"]["param_groups"] = [{"lr": 0.1, "params": list(NAMES)}]
    path = _save(tmp_path / "s.pt", content)
    with pytest.raises(NeedsInformationError) as error:
        _filled(path, "zeros")
    assert error.value.details == ("b: the others of its group do not agree on step",)


def test_the_states_of_one_flat_parameter_decide_before_those_of_the_group(tmp_path: Path) -> None:
    content = _content(b=0)
    content["optimizer"]["param_groups"] = [{"lr": 0.1, "params": list(NAMES)}]
    content["optimizer"]["state"]["c"]["step"] = torch.tensor(3.0)  # a, b and c are one unit, d is another
    found = _filled(_save(tmp_path / "s.pt", content), "zeros", _units())
    assert found.optim.state["b"]["step"].chunks.offset[0] == found.optim.state["a"]["step"].chunks.offset[0]


def test_a_frozen_parameter_needs_no_state_where_units_say_so(tmp_path: Path) -> None:
    path = _save(tmp_path / "s.pt", _content(b=0))
    with Sources() as sources:
        opened = open_checkpoint(path, sources=sources, locate=Locate.ALL)
        assert fill_missing(opened, "error", units=_units(b=False), sources=sources) is opened


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: state["a"].pop("exp_avg_sq"), "have the same states"),
        (lambda state: state["a"].update(seen=6), "do not agree on seen"),
        (lambda state: state["a"].update(exp_avg=torch.randn(4, 4)), "does not have the shape of its parameter"),
        (lambda state: [state.pop(name) for name in ("a", "c", "d")], "no other parameter of its group"),
        (lambda state: state["a"].update(exp_avg=state["a"]["exp_avg"].half()), "several dtypes"),
    ],
)
def test_a_form_in_doubt_is_refused_with_the_reason(change: Any, reason: str, tmp_path: Path) -> None:
    content = _content(b=0)
    content["optimizer"]["param_groups"] = [{"lr": 0.1, "params": ["a", "b", "c", "d"]}]
    for states in content["optimizer"]["state"].values():
        states["step"] = torch.tensor(1.0)
    change(content["optimizer"]["state"])
    content["optimizer"]["param_groups"].append({"params": ["e"]})
    content["optimizer"]["state"]["e"] = {"step": torch.tensor(1.0)}
    with pytest.raises(NeedsInformationError) as error:
        _filled(_save(tmp_path / "s.pt", content), "zeros")
    assert any(reason in line for line in error.value.details)


def test_a_parameter_of_unknown_shape_is_refused(tmp_path: Path) -> None:
    path = _save(tmp_path / "s.pt", _content(b=0)["optimizer"])
    with pytest.raises(NeedsInformationError) as error:
        _filled(path, "zeros")
    assert "b: its shape is not known" in error.value.details
    assert _filled(path, "zeros", _units()).optim.state["b"]["exp_avg"].shape == (7,)


def test_states_take_the_dtype_of_their_parameter_where_all_others_do(tmp_path: Path) -> None:
    content = _content(b=0)
    content["optimizer"]["param_groups"] = [{"lr": 0.1, "params": list(NAMES)}]
    for name, states in content["optimizer"]["state"].items():
        dtype = torch.bfloat16 if name == "c" else torch.float32
        content["model"][name] = content["model"][name].to(dtype)
        states.update({key: value.to(dtype) for key, value in states.items() if key.startswith("exp")})
        states["step"] = torch.tensor(1.0)
    content["model"]["b"] = content["model"]["b"].bfloat16()
    found = _filled(_save(tmp_path / "s.pt", content), "zeros")
    assert found.optim.state["b"]["exp_avg"].dtype is DTYPES["bfloat16"]


def test_a_flat_parameter_with_states_in_part_is_refused_by_name(tmp_path: Path) -> None:
    path = _save(tmp_path / "s.pt", _content(b=0, d=0))
    with Sources() as sources:
        opened = open_checkpoint(path, sources=sources, locate=Locate.ALL)
    with pytest.raises(NeedsInformationError, match=r"^All unflattened parameters comprising a single flat") as error:
        require_complete(opened, _units())
    assert isinstance(error.value, ValueError)  # PyTorch's type for it, too
    assert error.value.details == ("the root unit: b",) and "--missing-state zeros" in error.value.next_step
    require_complete(_filled(path, "zeros", _units(d=False)), _units())


def test_the_file_of_zeros_reads_as_zeros_anywhere_and_of_any_length() -> None:
    with Sources() as sources:
        source = sources.open_file(Zeros(1))
        assert isinstance(source, ZeroFile)
        assert source.read(1 << 60, 3) == b"\0\0\0"
        buffer = bytearray(b"\x07" * 2_500_001)
        source.read_into(5, memoryview(buffer))
        assert not any(buffer)


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
    fsdpckpt.convert(_save(tmp_path / "s.pt", content), tmp_path / "t.pt", missing_state="zeros")
    made = torch.load(tmp_path / "t.pt")["optimizer"]["state"]["b"]
    expected = {"step": torch.tensor(1.0), "exp_avg": torch.zeros(shape), "exp_avg_sq": torch.zeros(shape)}
    torch.testing.assert_close(made, expected, rtol=0, atol=0)
    for removed in (state, content["model"]):
        del removed["c"], removed["d"]  # type: ignore[attr-defined]  # what shows which states have dimensions
    del groups[1]
    with pytest.raises(NeedsInformationError) as error:
        _filled(_save(tmp_path / "s.pt", content), "zeros")
    assert "have no dimensions, so exp_avg may be one value" in error.value.details[0]
