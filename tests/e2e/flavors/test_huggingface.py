"""Weights exported for Hugging Face: the files that transformers itself writes, and it loads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from fsdpckpt.errors import SourceUnsupportedError
from tests.e2e.flavors.conftest import written
from tests.oracle.compare import identical, require_identical

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install -e .[dev]")
SIZE = 3000  # bytes of a shard


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A small Llama with tied words and random weights, as the Trainer leaves it: each name with its own bytes."""
    torch.manual_seed(11)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=31, hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=True,
        )
    )  # fmt: skip
    run = tmp_path_factory.mktemp("run")
    path = run / "checkpoint-7"
    path.mkdir()
    own = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    dcp.save({"model": own}, checkpoint_id=str(path / "pytorch_model_fsdp_0"))
    model.config.save_pretrained(path)
    for name in ("trainer_state.json", "tokenizer.json", "README.md"):
        (path / name).write_text(json.dumps({"of": name}))
    return model, run


def contents(directory: Path) -> tuple[list[dict[str, str]], dict[str, Tensor]]:
    """The metadata of each safetensors file, and all their tensors."""
    metadata, tensors = [], {}
    for path in sorted(directory.glob("*.safetensors")):
        metadata.append(safe_open(path, "pt").metadata())
        tensors.update(load_file(path))
    return metadata, tensors


def test_the_export_has_what_transformers_writes_and_loads(trained: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, run = trained
    target, theirs = tmp_path / "ours", tmp_path / "theirs"
    report = written(run, target, flavor="huggingface", max_shard_size=SIZE)
    model.save_pretrained(theirs, max_shard_size=SIZE)  # type: ignore[operator]
    (metadata, ours), (_, expected) = contents(target), contents(theirs)
    assert len(metadata) > 2 and all(one == {"format": "pt"} for one in metadata)
    assert "lm_head.weight" not in ours
    require_identical(ours, expected)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    reference = json.loads((theirs / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == reference["metadata"]["total_size"]
    assert index["weight_map"].keys() == reference["weight_map"].keys()
    assert any(note.kind == "tied" and note.key == "lm_head.weight" for note in report.notes)
    assert (target / "tokenizer.json").is_file() and not (target / "trainer_state.json").exists()

    loaded = transformers.LlamaForCausalLM.from_pretrained(target)
    tokens = torch.arange(9).reshape(1, 9)
    model.eval()
    assert identical(loaded(tokens).logits, model(tokens).logits)


def test_a_reference_makes_a_bare_checkpoint_one_that_transformers_loads(
    trained: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    model, run = trained
    bare, base = tmp_path / "checkpoint-7", tmp_path / "base"
    shutil.copytree(run / "checkpoint-7" / "pytorch_model_fsdp_0", bare / "pytorch_model_fsdp_0")
    report = written(bare, tmp_path / "alone", flavor="huggingface")
    assert any("--reference" in note.message for note in report.notes if note.kind == "unconfigured")
    with pytest.raises((OSError, ValueError), match=r"config\.json|model_type"):  # as the note says
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "alone")
    transformers.LlamaForCausalLM(model.config).save_pretrained(
        base
    )  # another model's weights, of the same names and shapes
    written(bare, tmp_path / "out", flavor="huggingface", reference=base)
    loaded, tokens = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out"), torch.arange(9).reshape(1, 9)
    model.eval()
    assert identical(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_the_configuration_of_another_model_is_refused_by_its_field(
    tied: bool, trained: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    """``tied`` False: one name for both words, as some saves have it."""
    model, run = trained
    source, base, config = run / "checkpoint-7", tmp_path / "base", run / "checkpoint-7" / "config.json"
    fields = (("vocab_size", 33, 31), ("hidden_size", 24, 12), ("intermediate_size", 21, 20))
    fields = (*fields, ("num_hidden_layers", 1, 2), ("num_hidden_layers", 3, 2))
    if not tied:
        fields = (("tie_word_embeddings", False, True),)
        own = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        torch.save(own, source := tmp_path / "one.pt")
    written(source, tmp_path / "right", flavor="huggingface", reference=config.parent)
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path / "right")
    base.mkdir()
    content = json.loads(config.read_text()) | {"architectures": ["LlamaForCausalLM"]}
    for field, other, right in fields:
        assert content[field] == right
        (base / "config.json").write_text(json.dumps(content | {field: other}))
        with pytest.raises(SourceUnsupportedError) as error:
            written(source, tmp_path / "out", flavor="huggingface", reference=base)
        (detail,) = error.value.details
        assert detail.startswith(f"{field}: expected {str(right).lower()}") and detail.endswith(f"{str(other).lower()}")
        assert str(base / "config.json") in error.value.what and not (tmp_path / "out").exists()


def test_a_reference_that_ties_what_was_trained_apart_is_refused(
    trained: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    model, run = trained
    own = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    own["lm_head.weight"][3, 4] += 1
    torch.save(own, tmp_path / "model.pt")
    with pytest.raises(SourceUnsupportedError, match=r"ties lm_head\.weight to model\.embed_tokens\.weight") as error:
        written(tmp_path / "model.pt", tmp_path / "out", flavor="huggingface", reference=run / "checkpoint-7")
    assert (error.value.expected, error.value.found) == ("tie_word_embeddings: false", "true")


def test_tied_copies_that_differ_both_stay(trained: tuple[nn.Module, Path], tmp_path: Path) -> None:
    model, _ = trained
    path = tmp_path / "checkpoint-1"
    path.mkdir()
    own = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    own["lm_head.weight"][30, 11] += 1
    torch.save(own, path / "pytorch_model_fsdp.bin")
    model.config.save_pretrained(path)  # type: ignore[operator,union-attr]
    (path / "trainer_state.json").write_text("{}")
    report = written(path, tmp_path / "out", flavor="huggingface")
    assert identical(contents(tmp_path / "out")[1]["lm_head.weight"], own["lm_head.weight"])
    assert any("differ" in note.message for note in report.notes if note.kind == "tied")
