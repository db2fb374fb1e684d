"""The Python API: the same answers as the commands, as objects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import UsageError
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


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda path: fsdpckpt.diff(path, path, rtol=-1), "rtol is too small"),
        (lambda path: fsdpckpt.diff(path, path, atol=-1e-9), "atol is too small"),
        (lambda path: fsdpckpt.diff(path, path, rtol=float("nan")), "rtol takes a number"),
        (lambda path: fsdpckpt.diff(path, path, rtol="x"), "rtol"),
        (lambda path: fsdpckpt.diff(path, path, threads=-3), "threads is too small"),
        (lambda path: fsdpckpt.verify(path, threads=0), "threads is too small"),
        (lambda path: fsdpckpt.inspect(path, stats=True, threads=0), "threads is too small"),
        (lambda path: fsdpckpt.inspect(path, ranks="no"), "ranks"),
        (lambda path: fsdpckpt.inspect(path, section="models"), "section"),
        (lambda path: fsdpckpt.StorageReader(path, threads=0), "threads"),
        *(
            (lambda path, wrong=wrong: fsdpckpt.convert(path, path.with_name("out"), **wrong), words)
            for wrong, words in (
                ({"colour": "red"}, "no option 'colour'"),
                ({"worldsize": 2}, r"did you mean world_size\?"),
                ({"num_gpus": 6}, "did you mean world_size"),
                ({"force": True}, "did you mean overwrite"),
                ({"to": "halved"}, "to cannot be .halved."),
                ({"to": "ful"}, "did you mean to='full'"),
                ({"to": "safetensors"}, "next: container='safetensors'"),
                ({"options": "--world-size 6"}, "options are given by name"),
                ({"max_memory": "lots"}, "max_memory: 'lots' is not a size"),
            )
        ),
    ],
)  # fmt: skip
def test_wrong_keywords_and_values_are_usage_errors(
    call: Callable[[Path], object], words: str, saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words) as wrong:
        call(saved)
    assert "None" not in str(wrong.value)
    assert list(tmp_path.iterdir()) == [saved]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = fsdpckpt.nonsense  # type: ignore[attr-defined]
