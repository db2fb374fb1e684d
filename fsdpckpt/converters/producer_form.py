"""Adapts a checkpoint to the form in which one producer saves: its sections, its extras, its weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from fsdpckpt.errors import SourceCorruptError
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Note
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value
from fsdpckpt.producers.forms import Flavor, Form
from fsdpckpt.producers.table import flavor_named
from fsdpckpt.readers.beside import side_files
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.elements import first_difference
from fsdpckpt.writers.torch_full import ties

__all__ = ["adapt_to_form", "export_weights"]

_CONFIG = "config.json"
_OUTPUT_LAYER = re.compile(r"(^|\.)lm_head\.weight$")  # what transformers leaves out of a model with tied embeddings
_WORD_EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings|tok_embeddings|embeddings)\.weight$")


def adapt_to_form(
    checkpoint: Checkpoint, flavor: Flavor, form: Form, *, world_size: int | None, sources: Sources
) -> tuple[Checkpoint, Mapping[str, Tensor]]:
    """``checkpoint`` with the sections that ``form`` has a place for, and the files beside it that go along."""
    beside = side_files(checkpoint, flavor, world_size, sources)
    notes = [note for note in checkpoint.notes if note.kind != "not-carried"]  # said again, for this producer
    optim = checkpoint.optim
    if optim is not None and form.optim is None:
        notes.append(
            Note("not-carried", f"the optimizer is not carried: the form of {flavor.title} has no place for it")
        )
        optim = None
    extra, rank_extra = checkpoint.extra, checkpoint.rank_extra
    if form.extra is None:
        same = checkpoint.flavor == flavor.name  # then extras that were read from files beside it go along as files
        files = {re.sub(r"(_\d+)?\.[^.]*$", "", name) for name in beside.files} if same else set()
        names = tuple(str(key) for key in extra if key not in files)
        if names:
            message = f"not carried, for the form of {flavor.title} has no place for them: {', '.join(names)}"
            notes.append(Note("not-carried", message, keys=names))
        extra, rank_extra = {}, ()
    elif form.model.at == () and form.extra.container is None:  # a tensor there would be one of the model's names
        names = tuple(str(key) for key, value in extra.items() if isinstance(value, Tensor))
        if names:
            message = f"not carried, as a tensor at the top of {flavor.title} is part of the model: {', '.join(names)}"
            notes.append(Note("not-carried", message, keys=names))
            extra = {key: value for key, value in extra.items() if not isinstance(value, Tensor)}
            rank_extra = tuple({key: value for key, value in each.items() if key not in names} for each in rank_extra)
    taken = replace(
        checkpoint,
        optim=optim,
        extra=extra,
        rank_extra=rank_extra,
        files=(*checkpoint.files, *beside.sources),
        notes=(*notes, *beside.notes),
    )
    return _adapt_extras(taken, flavor, form), beside.files


def _adapt_extras(checkpoint: Checkpoint, flavor: Flavor, form: Form) -> Checkpoint:
    """``checkpoint`` with the extras that ``form``'s loader opens, as it wants them; what was done is in the notes.

    An extra of a name that it opens, but not made as it makes it, is left out; the state of the source's LR scheduler
    goes where this producer has it; what its loader stops without is added.
    """
    notes = list(checkpoint.notes)
    extra, rank_extra = dict(checkpoint.extra), checkpoint.rank_extra
    foreign = tuple(key for key, keys in form.opened if extra.get(key) is not None and not _has(extra[key], keys))
    if foreign:
        extra = {key: value for key, value in extra.items() if key not in foreign}
        rank_extra = tuple({key: value for key, value in each.items() if key not in foreign} for each in rank_extra)
        message = f"not carried, as they are not what {flavor.title} has under that name: {', '.join(foreign)}"
        notes.append(Note("not-carried", message, keys=foreign))
    if form.schedule is not None and form.schedule[0] not in extra:
        place, keys = form.schedule
        schedule = _schedule(checkpoint)
        if _has(schedule, keys):
            extra[place] = schedule
            notes.append(Note("inferred", f"{place} is the state of the source's LR scheduler, as it is"))
    absent: list[tuple[str, Value]] = [
        (key, [] if value == () else value) for key, value in form.defaults if key not in extra
    ]
    if absent:
        said = ", ".join(f"{key} = {value!r}" for key, value in absent)
        notes.append(Note("inferred", f"what {flavor.title} needs and the source does not have was added: {said}"))
        extra.update(absent)
    return replace(checkpoint, extra=extra, rank_extra=rank_extra, notes=tuple(notes))


def _schedule(checkpoint: Checkpoint) -> Value:
    """The state dict of the source's LR scheduler, None where its producer keeps none that is torch's own."""
    source = flavor_named(checkpoint.flavor)
    found: Value = checkpoint.extra if source is not None and source.schedule else None
    for step in source.schedule if source is not None else ():
        if isinstance(found, dict):
            found = found.get(step)
        else:
            found = found[step] if isinstance(found, list) and isinstance(step, int) and step < len(found) else None
    return found


def _has(value: Value, keys: frozenset[str]) -> bool:
    return isinstance(value, dict) and keys <= value.keys()


def export_weights(checkpoint: Checkpoint, sources: Sources) -> Checkpoint:
    """``checkpoint`` without second copies of tied weights: those that share memory, and the output layer where the
    model's configuration ties it to the word embeddings and the two are equal to the byte.

    FSDP saves tied weights under both names, each with its own bytes. Copies that differ both stay, with a note.
    """
    model = checkpoint.model
    if model is None:
        return checkpoint
    notes: list[Note] = []
    first_of = ties([leaf for leaf in model.params.values() if isinstance(leaf, Tensor)])
    stored: dict[Tensor, str] = {}
    left_out: dict[str, str] = {}
    for name, leaf in model.params.items():
        if isinstance(leaf, Tensor):
            first = stored.setdefault(first_of.get(leaf, leaf), name)
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
    heads = [name for name in model.params if _OUTPUT_LAYER.search(name) and name not in known]
    words = [name for name in model.params if _WORD_EMBEDDINGS.search(name)]
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
