"""Weights for Hugging Face: one copy of what is tied, and tensors alone."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Note
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.content import first_difference
from fsdpckpt.writers.storages import ties

__all__ = ["for_export"]

_HEAD = re.compile(r"(^|\.)lm_head\.weight$")  # what transformers leaves out of the files of a model with tied words
_WORDS = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings|tok_embeddings|embeddings)\.weight$")
_CONFIG = "config.json"


def for_export(checkpoint: Checkpoint, sources: Sources) -> Checkpoint:
    """``checkpoint`` without second copies of tied weights: those that share memory, and the output layer where the
    model's configuration ties it to the word embeddings and the two are equal to the byte.

    FSDP saves tied weights under both names, each with its own bytes. Copies that differ both stay, with a note.
    """
    model = checkpoint.model
    if model is None:
        return checkpoint
    notes: list[Note] = []
    first_of = ties([leaf for leaf in model.params.values() if isinstance(leaf, Tensor)])
    stored: dict[int, str] = {}
    left_out: dict[str, str] = {}
    for name, leaf in model.params.items():
        if isinstance(leaf, Tensor):
            first = stored.setdefault(id(first_of.get(id(leaf), leaf)), name)
            if first != name:
                left_out[name] = first
    left_out |= _tied_by_configuration(checkpoint, model, set(left_out), sources, notes)
    values = [name for name, leaf in model.params.items() if not isinstance(leaf, Tensor)]
    notes += [Note("tied", f"{name} is left out: it is tied to {first}", name) for name, first in left_out.items()]
    notes += [Note("dropped", f"{name} is no tensor, and has no place among weights", name) for name in values]
    params = {name: leaf for name, leaf in model.params.items() if name not in left_out and name not in values}
    return replace(checkpoint, model=ModelState(params), notes=(*checkpoint.notes, *notes))


def _tied_by_configuration(
    checkpoint: Checkpoint, model: ModelState, known: set[str], sources: Sources, notes: list[Note]
) -> dict[str, str]:
    """The output layer to the word embeddings, where ``config.json`` says so and their bytes agree."""
    heads = [name for name in model.params if _HEAD.search(name) and name not in known]
    words = [name for name in model.params if _WORDS.search(name)]
    if len(heads) != 1 or len(words) != 1 or not _configured(checkpoint, sources):
        return {}
    head, word = model.params[heads[0]], model.params[words[0]]
    if not isinstance(head, Tensor) or not isinstance(word, Tensor) or head.shape != word.shape:
        return {}
    if head.dtype == word.dtype:
        own = (checkpoint.files, sources)
        if first_difference((head, *own), (word, *own), None) is None:
            return {heads[0]: words[0]}
    message = f"{_CONFIG} ties {heads[0]} to {words[0]}, and their values differ: both are written"
    notes.append(Note("tied", message, heads[0]))
    return {}


def _configured(checkpoint: Checkpoint, sources: Sources) -> bool:
    """Whether a configuration beside the checkpoint says that words are tied."""
    for folder in (checkpoint.directory, f"{checkpoint.directory.rstrip('/')}/huggingface"):
        path = f"{folder.rstrip('/')}/{_CONFIG}"
        if not checkpoint.directory or sources.stat(path) is None:
            continue
        source = sources.open(path)
        try:
            document = json.loads(source.read(0, source.nbytes))
        except (ValueError, RecursionError) as error:
            raise SourceCorruptError(
                f"{path} is no JSON",
                file=path,
                why="the copy did not finish, or it was edited by hand",
                next_step="restore it from the model's own directory, or move it away",
            ) from error
        text = document.get("text_config", document) if isinstance(document, dict) else {}
        return isinstance(text, dict) and text.get("tie_word_embeddings", document.get("tie_word_embeddings")) is True
    return False
