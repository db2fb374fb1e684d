"""Weights for Hugging Face: tied ones once, values that are no tensors left out and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fsdpckpt
from fsdpckpt.converters import Report
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, SourceMissingError, SourceUnsupportedError
from tests.converters.jobs import messages, notes, recorded, refused
from tests.oracle.compare import identical

WEIGHTS = {"model.embed_tokens.weight": torch.randn(7, 5), "model.norm.weight": torch.randn(5)}
HF: dict[str, Any] = {"flavor": "huggingface"}


def export(source: str, target: str = "out", **options: Any) -> Report:
    return fsdpckpt.convert(source, target, **HF, **options)


def exported(target: str = "out") -> dict[str, torch.Tensor]:
    return load_file(f"{target}/model.safetensors")


def saved(content: dict[str, Any], configuration: str | None = None, path: str = "run") -> str:
    Path(path).mkdir()
    torch.save(content, f"{path}/pytorch_model_fsdp.bin")
    if configuration is not None:
        Path(path, "config.json").write_text(configuration)
    return path


def test_weights_that_share_memory_are_written_once_under_the_first_name() -> None:
    shared, other = torch.randn(7, 5), torch.randn(5)
    report = export(saved({"wte.weight": shared, "norm.weight": other, "out.weight": shared}))
    assert sorted(exported()) == ["norm.weight", "wte.weight"] and identical(exported()["wte.weight"], shared)
    assert [note.key for note in notes(report, "tied")] == ["out.weight"]


@pytest.mark.parametrize(("says", "left"), [(True, 1), (False, 2), (None, 2)])
def test_equal_copies_are_one_only_where_the_configuration_ties_them(says: bool | None, left: int) -> None:
    words = torch.randn(7, 5)
    text = json.dumps({"tie_word_embeddings": says} if says is not None else {})
    export(saved({"model.embed_tokens.weight": words, "lm_head.weight": words.clone()}, text))
    assert len(exported()) == left


def test_the_export_of_a_compiled_model_holds_the_same_weights() -> None:
    export(saved({"_orig_mod.w": torch.randn(3, 2), "_orig_mod.cell.b": torch.randn(7)}, "{}"))
    assert sorted(exported()) == ["cell.b", "w"]
    for pair in (("run", "out"), ("out", "run")):
        found = fsdpckpt.diff(*pair)
        assert found.same and found.count("=") == 2 and "wrapper modules" in found.notes[0]


def test_a_value_that_is_no_tensor_is_left_out_and_named() -> None:
    report = export(saved({"w": torch.randn(3, 2), "cell._extra_state": {"seen": 5}}))
    with safe_open("out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"} and list(file.keys()) == ["w"]
    assert "cell._extra_state" in [note.key for note in notes(report, "dropped")]


def reference(path: str = "llama", weights: dict[str, torch.Tensor] | None = None, **configuration: Any) -> str:
    """The directory of a model that somebody downloaded."""
    Path(path).mkdir()
    for name in ("tokenizer.json", "generation_config.json", "README.md", "training_args.bin"):
        Path(path, name).write_text(f'{{"of": "{name}"}}')
    Path(path, "config.json").write_text(json.dumps(configuration or {"tie_word_embeddings": True}))
    if weights is not None:
        save_file(weights, f"{path}/model.safetensors")
    return path


@pytest.mark.parametrize("with_weights", [False, True])
def test_a_reference_gives_configuration_and_tokenizer(with_weights: bool, tmp_path: Path) -> None:
    words = torch.randn(7, 5)
    content = {**WEIGHTS, "model.embed_tokens.weight": words, "lm_head.weight": words.clone()}
    named = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    reference("llama", named if with_weights else None)  # tied: it has no lm_head.weight
    source = tmp_path / saved(content, '{"tie_word_embeddings": false}')
    report = export(str(source), str(tmp_path / "out"), reference=tmp_path / "llama")
    described = {"config.json", "tokenizer.json", "generation_config.json"}
    assert {path.name for path in Path("out").iterdir()} == {"model.safetensors", "fsdpckpt.json", *described}
    assert all(Path("out", name).read_bytes() == Path("llama", name).read_bytes() for name in described)
    assert exported().keys() == WEIGHTS.keys() and identical(exported()["model.embed_tokens.weight"], words)
    assert not notes(report, "unconfigured")
    assert any("llama" in note.message for note in notes(report, "carried"))
    assert str(tmp_path) not in json.dumps(recorded("out")) and recorded("out")["source"] == "run", "people upload it"


def test_what_does_not_describe_the_weights_is_refused_by_name_and_shape() -> None:
    saved(WEIGHTS)
    other = {"model.embed_tokens.weight": torch.zeros(9, 5), "model.other.weight": torch.zeros(5)}
    error = refused(SourceUnsupportedError, "do not fit", "run", "out", **HF, reference=reference(weights=other))
    details = "\n".join(error.details)
    assert "model.embed_tokens.weight: expected [9, 5], found [7, 5]" in details
    assert "model.norm.weight: not in" in details and "model.other.weight: not in" in details
    refused(SourceMissingError, "does not exist", "run", "out", **HF, reference="nowhere")
    assert messages(fsdpckpt.convert("run", "full.pt", reference="."), "--reference had no effect")
    (note,) = notes(export("run"), "unconfigured")
    assert "config.json" in note.message and "--reference DIR" in note.message, "what from_pretrained needs"
    content = {"wte.weight": torch.randn(3, 2), "lm_head.weight": torch.randn(3, 2)}
    refused(SourceCorruptError, "not JSON", saved(content, '{"tie_word', "damaged"), "no", **HF)


def test_no_safetensors_directory_says_where_it_was_made(tmp_path: Path) -> None:
    source = tmp_path / saved({**WEIGHTS, "cell._extra_state": {"seen": 5}})
    (source / "notes.txt").write_text("not carried")
    fsdpckpt.convert(source, tmp_path / "out", container="safetensors")
    assert str(tmp_path) not in json.dumps(recorded("out"))
    fsdpckpt.convert(source, tmp_path / "dcp", to="sharded", flavor="plain")
    assert str(source) in json.dumps(recorded("dcp")), "what stays here says where it is from"


@pytest.mark.parametrize("head", ["lm_head.weight", "embed_out.weight", "output.weight"])
def test_an_output_layer_counts_by_any_name_where_the_configuration_does_not_tie_it(head: str) -> None:
    """GPT-NeoX and InternLM2 have no ``lm_head``; their configurations say ``"tie_word_embeddings": false``."""
    reference("neox", tie_word_embeddings=False, architectures=["GPTNeoXForCausalLM"])
    words = {"gpt_neox.embed_in.weight": torch.randn(7, 5)}
    export(saved({**words, head: torch.randn(7, 5)}), reference="neox")
    source = saved(words, path="without")
    error = refused(SourceUnsupportedError, "does not describe the model", source, "out2", **HF, reference="neox")
    assert error.details[0].startswith("tie_word_embeddings: expected true")


def test_a_weight_without_dimensions_has_no_rows_to_compare_with_the_configuration() -> None:
    saved({"embed_tokens.weight": torch.ones(()), "w": torch.ones(2, 3)})
    assert export("run", reference=reference(vocab_size=7)).tensors == 2


# The dtype that the configuration states

CONFIGURED = {"w": torch.randn(3, 2), "norm.weight": torch.randn(5), "count": torch.tensor([3])}


def saved_with_dcp(configuration: str | None) -> str:
    """A directory of ``dcp.save`` with what Hugging Face's own code would put beside it."""
    dcp.save({"model": dict(CONFIGURED)}, checkpoint_id="run", no_dist=True)
    if configuration is not None:
        for name, text in (("config.json", configuration), ("tokenizer.json", "{}"), ("loss.csv", "1")):
            Path("run", name).write_text(text)
    return "run"


def about_dtype(report: Report) -> list[str]:
    return [note.message for note in notes(report, "config-dtype")]


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_what_lies_beside_a_plain_checkpoint_goes_with_its_weights(field: str) -> None:
    report = export(saved_with_dcp(json.dumps({field: "bfloat16"})))
    names = sorted(path.name for path in Path("out").iterdir())
    assert names == ["config.json", "fsdpckpt.json", "model.safetensors", "tokenizer.json"]
    assert about_dtype(report) == [
        "the weights are written as float32, and config.json says bfloat16: --dtype auto casts them to bfloat16"
    ]
    assert [note.message for note in report.notes if "config.json" in note.message and note.warning] == []
    assert [note.keys for note in notes(report, "not-carried")] == [("loss.csv",)]


def test_dtype_auto_is_that_of_the_configuration() -> None:
    report = export(saved_with_dcp('{"torch_dtype": "float16"}'), dtype="auto", verify="full")
    assert identical(exported()["w"], CONFIGURED["w"].to(torch.float16)) and exported()["count"].dtype == torch.int64
    assert about_dtype(report) == ["--dtype auto is float16, as config.json states"]
    export("run", "like-base", dtype="auto", reference=reference("base", text_config={"dtype": "bfloat16"}))
    assert exported("like-base")["w"].dtype == torch.bfloat16


def test_weights_as_the_configuration_says_need_no_note() -> None:
    assert about_dtype(export(saved_with_dcp('{"dtype": "float32"}'))) == []
    assert about_dtype(export("run", "cast", dtype="bfloat16")) == [
        "the weights are written as bfloat16, and config.json says float32: --dtype auto casts them to float32"
    ]


@pytest.mark.parametrize("configuration", [None, "{}", '{"dtype": "auto"}'])
def test_dtype_auto_without_a_dtype_is_asked(configuration: str | None) -> None:
    refused(NeedsInformationError, "states a dtype", saved_with_dcp(configuration), "out", **HF, dtype="auto")
