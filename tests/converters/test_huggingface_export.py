"""Weights for Hugging Face: tied ones once, values that are no tensors left out and named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fsdpckpt.comm.protocol import Solo
from fsdpckpt.converters.pipeline import convert
from fsdpckpt.converters.report import Report
from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.options import ConvertOptions
from fsdpckpt.progress import NoProgress


def export(source: Path, target: Path) -> Report:
    return convert(Solo(), str(source), str(target), ConvertOptions(flavor="huggingface"), NoProgress())


def saved(path: Path, content: dict[str, object], configuration: str | None = None) -> Path:
    path.mkdir()
    torch.save(content, path / "pytorch_model_fsdp.bin")
    if configuration is not None:
        (path / "config.json").write_text(configuration)
    return path


def test_weights_that_share_memory_are_written_once_under_the_first_name(tmp_path: Path) -> None:
    shared, other = torch.randn(7, 5), torch.randn(5)
    report = export(
        saved(tmp_path / "run", {"wte.weight": shared, "norm.weight": other, "out.weight": shared}), tmp_path / "out"
    )
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(found) == ["norm.weight", "wte.weight"] and torch.equal(found["wte.weight"], shared)
    assert [note.key for note in report.notes if note.kind == "tied"] == ["out.weight"]


@pytest.mark.parametrize(("says", "left"), [(True, 1), (False, 2), (None, 2)])
def test_equal_copies_are_one_only_where_the_configuration_ties_them(
    tmp_path: Path, says: bool | None, left: int
) -> None:
    words = torch.randn(7, 5)
    content: dict[str, object] = {"model.embed_tokens.weight": words, "lm_head.weight": words.clone()}
    text = json.dumps({"tie_word_embeddings": says} if says is not None else {})
    export(saved(tmp_path / "run", content, text), tmp_path / "out")
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == left


def test_a_value_that_is_no_tensor_is_left_out_and_named(tmp_path: Path) -> None:
    content: dict[str, object] = {"w": torch.randn(3, 2), "cell._extra_state": {"seen": 5}}
    report = export(saved(tmp_path / "run", content), tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"} and list(file.keys()) == ["w"]
    assert any(note.key == "cell._extra_state" for note in report.notes if note.kind == "dropped")


def test_a_configuration_that_is_no_json_is_refused(tmp_path: Path) -> None:
    content: dict[str, object] = {"wte.weight": torch.randn(3, 2), "lm_head.weight": torch.randn(3, 2)}
    with pytest.raises(SourceCorruptError, match="no JSON"):
        export(saved(tmp_path / "run", content, '{"tie_word'), tmp_path / "out")
