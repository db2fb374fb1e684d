"""Weights for Hugging Face: tied ones once, values that are no tensors left out and named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fsdpckpt
from fsdpckpt.comm.protocol import Solo
from fsdpckpt.converters import Report
from fsdpckpt.converters.pipeline import convert
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError, SourceMissingError, SourceUnsupportedError
from fsdpckpt.options import ConvertOptions
from fsdpckpt.progress import NoProgress
from tests.oracle.compare import identical


def export(source: Path, target: Path, **options: object) -> Report:
    chosen = ConvertOptions(flavor="huggingface", **options)  # type: ignore[arg-type]
    return convert(Solo(), str(source), str(target), chosen, NoProgress())


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
    assert sorted(found) == ["norm.weight", "wte.weight"] and identical(found["wte.weight"], shared)
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


def test_the_export_of_a_compiled_model_holds_the_same_weights(tmp_path: Path) -> None:
    content: dict[str, object] = {"_orig_mod.w": torch.randn(3, 2), "_orig_mod.cell.b": torch.randn(7)}
    export(saved(tmp_path / "run", content, "{}"), tmp_path / "out")
    assert sorted(load_file(tmp_path / "out" / "model.safetensors")) == ["cell.b", "w"]
    for pair in ((tmp_path / "run", tmp_path / "out"), (tmp_path / "out", tmp_path / "run")):
        found = fsdpckpt.diff(*pair)
        assert found.same and found.count("=") == 2 and "wrapper modules" in found.notes[0]


def test_a_value_that_is_no_tensor_is_left_out_and_named(tmp_path: Path) -> None:
    content: dict[str, object] = {"w": torch.randn(3, 2), "cell._extra_state": {"seen": 5}}
    report = export(saved(tmp_path / "run", content), tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"} and list(file.keys()) == ["w"]
    assert any(note.key == "cell._extra_state" for note in report.notes if note.kind == "dropped")


def test_a_configuration_that_is_no_json_is_refused(tmp_path: Path) -> None:
    content: dict[str, object] = {"wte.weight": torch.randn(3, 2), "lm_head.weight": torch.randn(3, 2)}
    with pytest.raises(SourceCorruptError, match="not JSON"):
        export(saved(tmp_path / "run", content, '{"tie_word'), tmp_path / "out")


WEIGHTS: dict[str, object] = {"model.embed_tokens.weight": torch.randn(7, 5), "model.norm.weight": torch.randn(5)}


def reference(path: Path, weights: dict[str, torch.Tensor] | None = None) -> Path:
    """The directory of a model that somebody downloaded."""
    path.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "README.md", "training_args.bin"):
        (path / name).write_text(f'{{"of": "{name}"}}')
    (path / "config.json").write_text('{"tie_word_embeddings": true}')
    if weights is not None:
        save_file(weights, path / "model.safetensors")
    return path


def test_a_directory_without_a_configuration_says_what_from_pretrained_needs(tmp_path: Path) -> None:
    report = export(saved(tmp_path / "run", WEIGHTS), tmp_path / "out")
    (note,) = (note.message for note in report.notes if note.kind == "unconfigured")
    assert "config.json" in note and "--reference DIR" in note


@pytest.mark.parametrize("with_weights", [False, True])
def test_a_reference_gives_configuration_and_tokenizer(tmp_path: Path, with_weights: bool) -> None:
    words = torch.randn(7, 5)
    content = {**WEIGHTS, "model.embed_tokens.weight": words, "lm_head.weight": words.clone()}
    named = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items() if isinstance(tensor, torch.Tensor)}
    model = reference(tmp_path / "llama", named if with_weights else None)  # tied: it has no lm_head.weight
    source = saved(tmp_path / "run", content, '{"tie_word_embeddings": false}')
    report = export(source, tmp_path / "out", reference=str(model))
    written = {path.name for path in (tmp_path / "out").iterdir()}
    described = {"config.json", "tokenizer.json", "generation_config.json"}
    assert written == {"model.safetensors", "fsdpckpt.json", *described}
    assert all((tmp_path / "out" / name).read_bytes() == (model / name).read_bytes() for name in described)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == WEIGHTS.keys() and identical(found["model.embed_tokens.weight"], words)
    assert not any(note.kind == "unconfigured" for note in report.notes)
    assert any(note.kind == "carried" and "llama" in note.message for note in report.notes)
    text = (tmp_path / "out" / "fsdpckpt.json").read_text()
    assert str(tmp_path) not in text and json.loads(text)["source"] == "run", "people upload it"


def test_weights_that_are_not_the_references_are_refused_by_name_and_shape(tmp_path: Path) -> None:
    other = {"model.embed_tokens.weight": torch.zeros(9, 5), "model.other.weight": torch.zeros(5)}
    with pytest.raises(SourceUnsupportedError, match="do not fit") as caught:
        export(saved(tmp_path / "run", WEIGHTS), tmp_path / "out", reference=str(reference(tmp_path / "llama", other)))
    details = "\n".join(caught.value.details)
    assert "model.embed_tokens.weight: expected [9, 5], found [7, 5]" in details
    assert "model.norm.weight: not in" in details and "model.other.weight: not in" in details
    assert not (tmp_path / "out").exists()


def test_a_reference_that_is_not_there_is_an_error_and_one_that_nothing_needs_is_noted(tmp_path: Path) -> None:
    source = saved(tmp_path / "run", WEIGHTS)
    with pytest.raises(SourceMissingError, match="does not exist"):
        export(source, tmp_path / "out", reference=str(tmp_path / "nowhere"))
    report = fsdpckpt.convert(source, tmp_path / "full.pt", reference=tmp_path)
    assert any("--reference had no effect" in note.message for note in report.notes)


def test_no_safetensors_directory_says_where_it_was_made(tmp_path: Path) -> None:
    source = saved(tmp_path / "run", {**WEIGHTS, "cell._extra_state": {"seen": 5}})
    (source / "notes.txt").write_text("not carried")
    fsdpckpt.convert(source, tmp_path / "out", container="safetensors")
    assert str(tmp_path) not in (tmp_path / "out" / "fsdpckpt.json").read_text()
    fsdpckpt.convert(source, tmp_path / "dcp", to="sharded", flavor="plain")
    assert str(source) in (tmp_path / "dcp" / "fsdpckpt.json").read_text(), "what stays here says where it is from"


@pytest.mark.parametrize("head", ["lm_head.weight", "embed_out.weight", "output.weight"])
def test_an_output_layer_counts_by_any_name_where_the_configuration_does_not_tie_it(tmp_path: Path, head: str) -> None:
    """GPT-NeoX and InternLM2 have no ``lm_head``; their configurations say ``"tie_word_embeddings": false``."""
    model = reference(tmp_path / "neox")
    (model / "config.json").write_text('{"tie_word_embeddings": false, "architectures": ["GPTNeoXForCausalLM"]}')
    words: dict[str, object] = {"gpt_neox.embed_in.weight": torch.randn(7, 5)}
    export(saved(tmp_path / "run", {**words, head: torch.randn(7, 5)}), tmp_path / "out", reference=str(model))
    with pytest.raises(SourceUnsupportedError, match="does not describe the model") as caught:
        export(saved(tmp_path / "without", words), tmp_path / "out2", reference=str(model))
    assert caught.value.details[0].startswith("tie_word_embeddings: expected true")


def test_a_weight_without_dimensions_has_no_rows_to_compare_with_the_configuration(tmp_path: Path) -> None:
    source = saved(tmp_path / "source", {"embed_tokens.weight": torch.ones(()), "w": torch.ones(2, 3)})
    described = tmp_path / "described"
    described.mkdir()
    (described / "config.json").write_text('{"vocab_size": 7}')
    report = export(source, tmp_path / "out", reference=str(described))
    assert report.tensors == 2


CONFIGURED = {"w": torch.randn(3, 2), "norm.weight": torch.randn(5), "count": torch.tensor([3])}


def saved_with_dcp(path: Path, configuration: str | None) -> Path:
    """A directory of ``dcp.save`` with what Hugging Face's own code would put beside it."""
    dcp.save({"model": dict(CONFIGURED)}, checkpoint_id=path, no_dist=True)
    if configuration is not None:
        (path / "config.json").write_text(configuration)
        (path / "tokenizer.json").write_text("{}")
        (path / "loss.csv").write_text("1")
    return path


def about_dtype(report: Report) -> list[str]:
    return [note.message for note in report.notes if note.kind == "config-dtype"]


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_what_lies_beside_a_plain_checkpoint_goes_with_its_weights(tmp_path: Path, field: str) -> None:
    source = saved_with_dcp(tmp_path / "run", json.dumps({field: "bfloat16"}))
    report = export(source, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "fsdpckpt.json", "model.safetensors", "tokenizer.json"]
    assert about_dtype(report) == [
        "the weights are written as float32, and config.json says bfloat16: --dtype auto casts them to bfloat16"
    ]
    assert [note.message for note in report.notes if "config.json" in note.message and note.warning] == []
    assert [note.keys for note in report.notes if note.kind == "not-carried"] == [("loss.csv",)]


def test_dtype_auto_is_that_of_the_configuration(tmp_path: Path) -> None:
    source = saved_with_dcp(tmp_path / "run", '{"torch_dtype": "float16"}')
    report = export(source, tmp_path / "out", dtype="auto", verify="full")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert identical(found["w"], CONFIGURED["w"].to(torch.float16)) and found["count"].dtype == torch.int64
    assert about_dtype(report) == ["--dtype auto is float16, as config.json states"]
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"text_config": {"dtype": "bfloat16"}}')
    export(source, tmp_path / "like-base", dtype="auto", reference=str(base))
    assert load_file(tmp_path / "like-base" / "model.safetensors")["w"].dtype == torch.bfloat16


def test_weights_as_the_configuration_says_need_no_note(tmp_path: Path) -> None:
    source = saved_with_dcp(tmp_path / "run", '{"dtype": "float32"}')
    assert about_dtype(export(source, tmp_path / "out")) == []
    assert about_dtype(export(source, tmp_path / "cast", dtype="bfloat16")) == [
        "the weights are written as bfloat16, and config.json says float32: --dtype auto casts them to float32"
    ]


@pytest.mark.parametrize("configuration", [None, "{}", '{"dtype": "auto"}'])
def test_dtype_auto_without_a_dtype_is_asked(tmp_path: Path, configuration: str | None) -> None:
    with pytest.raises(NeedsInformationError, match="states a dtype"):
        export(saved_with_dcp(tmp_path / "run", configuration), tmp_path / "out", dtype="auto")
