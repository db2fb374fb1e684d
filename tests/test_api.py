"""The Python API: the same answers as the commands, as objects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import SourceMissingError, UsageError
from tests.oracle.compare import identical


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    state = {
        "model": {
            "a.weight": torch.randn(5, 3).t(),
            "b.weight": torch.randn(4, 2).bfloat16(),
            "count": torch.tensor(7),
            "empty": torch.randn(0, 3),
        },
        "optimizer": {
            "state": {"a.weight": {"exp_avg": torch.randn(3, 5), "step": torch.tensor(4.0)}},
            "param_groups": [{"lr": 0.1, "params": ["a.weight"]}],
        },
    }
    torch.save(state, tmp_path / "state.pt")
    return tmp_path / "state.pt"


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, fsdpckpt; print([name in sys.modules for name in ('numpy', 'fsdpckpt.api')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[False, False]\n"


def test_the_package_offers_its_public_names_only() -> None:
    assert dir(fsdpckpt) == sorted(fsdpckpt.__all__)
    assert all(hasattr(fsdpckpt, name) for name in dir(fsdpckpt))


def test_without_torch_what_needs_it_names_the_command_that_installs_it(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert set(fsdpckpt.__all__) - set(dir(fsdpckpt)) == {"StorageReader"}
    with fsdpckpt.open(saved) as checkpoint:
        for needs_torch in (
            lambda: fsdpckpt.StorageReader,
            lambda: fsdpckpt.comm.gather,
            lambda: fsdpckpt.save_units(None, None, tmp_path),  # type: ignore[arg-type]
            checkpoint["a.weight"].torch,
            lambda: fsdpckpt.convert(saved, tmp_path / "out.pt", nproc_per_node=2),
        ):
            with pytest.raises(ImportError, match="PyTorch, which is not installed") as raised:
                needs_torch()
            assert isinstance(raised.value, UsageError)
            assert raised.value.next_step == 'pip install "fsdpckpt[torch]"'


def test_verify_is_a_function_before_and_after_its_package_is_imported(saved: Path) -> None:
    code = (
        "import sys, fsdpckpt; first = fsdpckpt.verify(sys.argv[1])\n"
        "import fsdpckpt.verify.blocks\n"
        "second = fsdpckpt.verify(sys.argv[1], digests=True)\n"
        "assert first.whole and second.whole and len(second.digests) == 6, second\n"
        "assert not {'torch', 'jinja2'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code, str(saved)], check=True)


def test_open_gives_tensors_by_name_as_numpy_and_as_torch(saved: Path) -> None:
    truth = torch.load(saved, weights_only=True)
    with fsdpckpt.open(saved) as checkpoint:
        assert list(checkpoint) == ["a.weight", "b.weight", "count", "empty", "a.weight.exp_avg", "a.weight.step"]
        for name, value in truth["model"].items():
            tensor = checkpoint[name]
            assert (tensor.shape, tensor.section) == (tuple(value.shape), "model")
            assert identical(tensor.torch(), value)
            assert tensor.torch().dtype == value.dtype
        assert np.array_equal(checkpoint["a.weight"].numpy(), truth["model"]["a.weight"].numpy())
        assert checkpoint["b.weight"].numpy().dtype.name == "bfloat16"
        assert list(checkpoint.section("optim")) == ["a.weight.exp_avg", "a.weight.step"]
        assert checkpoint.param_groups == [{"lr": 0.1, "params": ["a.weight"]}]
        assert repr(checkpoint["count"]) == "LazyTensor('count', int64, [])"
        with pytest.raises(KeyError):
            checkpoint["nothing"]


def test_inspect_returns_a_description(saved: Path) -> None:
    found = fsdpckpt.inspect(saved, keys=["*.weight"], section="model", stats=True)
    assert [named.key for named in found.tensors] == ["a.weight", "b.weight"]
    assert found.sections["model"].elements == 15 + 8 + 1
    document = found.to_json()
    assert repr(document) == repr(json.loads(json.dumps(document)))  # also as it prints: keys are plain strings
    with pytest.raises(UsageError, match="section"):
        fsdpckpt.inspect(saved, section="models")


def test_convert_and_diff_take_paths_and_strings(saved: Path, tmp_path: Path) -> None:
    report = fsdpckpt.convert(saved, tmp_path / "out", to="sharded", world_size=2, buffers="count", max_memory="8MiB")
    assert (report.layout, report.container, report.world_size) == ("sharded", "dcp", 2)
    assert fsdpckpt.diff(saved, tmp_path / "out").same
    renamed = fsdpckpt.convert(saved, tmp_path / "m.pt", to="full", only="model", rename={"a": "first"})
    assert renamed.tensors == 4
    result = fsdpckpt.diff(saved, tmp_path / "m.pt", only="model")
    assert {entry.key: entry.sigil for entry in result.entries if entry.sigil != "="} == {
        "a.weight": "-",
        "first.weight": "+",
    }


def test_paths_may_be_bytes_and_anything_else_is_a_type_error(saved: Path, tmp_path: Path) -> None:
    source, target = os.fsencode(saved), os.fsencode(tmp_path / "out.pt")
    fsdpckpt.convert(source, target, to="full")  # type: ignore[arg-type]
    assert fsdpckpt.diff(source, target).same and fsdpckpt.verify(target).whole  # type: ignore[arg-type]
    assert fsdpckpt.inspect(source).to_json()["source"] == str(saved)  # type: ignore[arg-type]
    for call in (fsdpckpt.inspect, fsdpckpt.verify, fsdpckpt.open):
        with pytest.raises(TypeError, match=r"expected str, bytes or os\.PathLike object, not NoneType"):
            call(None)  # type: ignore[arg-type]


def test_wrong_keywords_and_values_are_usage_errors(saved: Path, tmp_path: Path) -> None:
    for wrong, words in (
        ({"colour": "red"}, "no option 'colour'"),
        ({"worldsize": 2}, r"did you mean world_size\?"),
        ({"to": "halved"}, "to cannot be .halved."),
        ({"max_memory": "lots"}, "max_memory: 'lots' is not a size"),
    ):
        with pytest.raises(UsageError, match=words):
            fsdpckpt.convert(saved, tmp_path / "out.pt", **wrong)
    with pytest.raises(SourceMissingError):
        fsdpckpt.open(tmp_path / "nowhere")


def test_numbers_are_checked_as_on_the_command_line(saved: Path) -> None:
    for tolerance in ({"rtol": -1}, {"atol": -1e-9}):
        with pytest.raises(UsageError, match="tol is too small"):
            fsdpckpt.diff(saved, saved, **tolerance)
    with pytest.raises(UsageError, match="rtol takes a number"):
        fsdpckpt.diff(saved, saved, rtol=float("nan"))
    for call in (lambda: fsdpckpt.diff(saved, saved, threads=-3), lambda: fsdpckpt.verify(saved, threads=0)):
        with pytest.raises(UsageError, match="threads is too small"):
            call()
    with pytest.raises(UsageError, match="threads is too small"):
        fsdpckpt.inspect(saved, stats=True, threads=0)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = fsdpckpt.nonsense  # type: ignore[attr-defined]


def test_a_dtype_may_be_torchs_own(saved: Path, tmp_path: Path) -> None:
    report = fsdpckpt.convert(saved, tmp_path / "half.pt", only="model", dtype=torch.bfloat16)
    assert any("to bfloat16" in note.message for note in report.notes)


def test_a_description_at_a_prompt_is_one_line(saved: Path) -> None:
    text = repr(fsdpckpt.inspect(saved))
    assert text.startswith(f"<{saved}: full, torch, world size 1, ")
    assert len(text.splitlines()) == 1


def test_results_at_a_prompt_are_one_line_and_no_truth_value(saved: Path, tmp_path: Path) -> None:
    """``assert verify(path)`` would pass for every checkpoint."""
    report = fsdpckpt.convert(saved, tmp_path / "two", to="sharded", world_size=2)
    shown = [repr(report), repr(fsdpckpt.verify(saved)), repr(fsdpckpt.diff(saved, tmp_path / "two"))]
    assert [text.count("\n") for text in shown] == [0, 0, 0] and max(map(len, shown)) < 500
    assert "sharded, dcp (plain), 2 ranks" in shown[0] and " is whole: 6 tensors" in shown[1]
    assert f" 0 differ, 0 only in {saved}" in shown[2]
    with pytest.raises(TypeError, match="whole"):
        bool(fsdpckpt.verify(saved))
    with pytest.raises(TypeError, match="same"):
        bool(fsdpckpt.diff(saved, saved))
