"""Makes weights into a directory that ``from_pretrained`` loads: tied ones once, the model's own files beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fsdpckpt.errors import SourceCorruptError, SourceUnrecognisedError
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Note
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.side_files import files_of_model
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.elements import first_difference
from fsdpckpt.writers.torch_full import ties

_CONFIG = "config.json"
_OUTPUT_LAYER = re.compile(r"(^|\.)lm_head\.weight$")  # what transformers leaves out of a model with tied embeddings
_WORD_EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings|tok_embeddings|embeddings)\.weight$")
_NEEDED = (
    f"from_pretrained also needs {_CONFIG}, and the tokenizer's files, which are not there: add --reference DIR, the "
    "directory of the model that was trained"
)


def finish_export(
    checkpoint: Checkpoint, side_files: Mapping[str, Tensor], reference: str | None, sources: Sources
) -> tuple[Checkpoint, Mapping[str, Tensor]]:
    """The weights of ``checkpoint`` for ``from_pretrained``, and the files beside them.

    ``side_files``: those that lie beside the source. ``reference``: a directory whose configuration, tokenizer and
    generation settings are taken instead; where it holds weights, these must have the same names and shapes. Raises
    SourceCorruptError when they have not, SourceMissingError when there is no such directory.
    """
    files = dict(side_files)
    folders = [checkpoint.directory, f"{checkpoint.directory.rstrip('/')}/huggingface"] if checkpoint.directory else []
    if reference is not None:
        own = files_of_model(reference, checkpoint.files, sources)
        files.update(own.files)
        folders = [reference]
        checkpoint = replace(checkpoint, files=(*checkpoint.files, *own.sources), notes=(*checkpoint.notes, *own.notes))
        _check_against(reference, checkpoint, sources)
    if _CONFIG not in files:
        checkpoint = replace(checkpoint, notes=(*checkpoint.notes, Note("unconfigured", _NEEDED)))
    return _export(checkpoint, folders, sources), files


def _check_against(reference: str, checkpoint: Checkpoint, sources: Sources) -> None:
    try:
        opened = open_checkpoint(reference, sources=sources, locate=False)
    except SourceUnrecognisedError:  # a configuration and a tokenizer, and no weights
        return
    if opened.model is not None:
        _require_fitting(checkpoint, opened)


def _export(checkpoint: Checkpoint, folders: Sequence[str], sources: Sources) -> Checkpoint:
    """``checkpoint`` without second copies of tied weights: those that share memory, and the output layer where the
    model's configuration ties it to the word embeddings and the two are equal to the byte.

    FSDP saves tied weights under both names, each with its own bytes. Copies that differ both stay, with a note.
    ``folders``: where the configuration is looked for, first to last.
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
    left_out |= _tied_by_configuration(checkpoint, model, set(left_out), folders, sources, notes)
    values = [name for name, leaf in model.params.items() if not isinstance(leaf, Tensor)]
    notes += [Note("tied", f"{name} is left out: it is tied to {first}", name) for name, first in left_out.items()]
    notes += [Note("dropped", f"{name} is not a tensor, and has no place among weights", name) for name in values]
    params = {name: leaf for name, leaf in model.params.items() if name not in left_out and name not in values}
    return replace(checkpoint, model=ModelState(params), notes=(*checkpoint.notes, *notes))


def _tied_by_configuration(
    checkpoint: Checkpoint,
    model: ModelState,
    known: set[str],
    folders: Sequence[str],
    sources: Sources,
    notes: list[Note],
) -> dict[str, str]:
    """The output layer to the word embeddings, where ``config.json`` says so and their bytes agree."""
    heads = [name for name in model.params if _OUTPUT_LAYER.search(name) and name not in known]
    words = [name for name in model.params if _WORD_EMBEDDINGS.search(name)]
    if len(heads) != 1 or len(words) != 1 or not _configured(folders, sources):
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


def _configured(folders: Sequence[str], sources: Sources) -> bool:
    """Whether the first configuration in ``folders`` says that words are tied."""
    for folder in folders:
        path = f"{folder.rstrip('/')}/{_CONFIG}"
        if sources.stat(path) is None:
            continue
        source = sources.open(path)
        try:
            document = json.loads(source.read(0, source.nbytes))
        except (ValueError, RecursionError) as error:
            raise SourceCorruptError(
                f"{path} is not JSON",
                file=path,
                why="the copy did not finish, or it was edited by hand",
                next_step="restore it from the model's own directory, or move it away",
            ) from error
        text = document.get("text_config", document) if isinstance(document, dict) else {}
        return isinstance(text, dict) and text.get("tie_word_embeddings", document.get("tie_word_embeddings")) is True
    return False


def _require_fitting(checkpoint: Checkpoint, reference: Checkpoint) -> None:
    """Raises SourceCorruptError, naming every weight, when the model is not the reference's by names and shapes."""
    found, expected = _shapes(checkpoint), _shapes(reference)
    wrong = [f"{name}: not in {reference.source}" for name in found if name not in expected]
    wrong += [f"{name}: not in {checkpoint.source}" for name in expected if name not in found]
    wrong = [
        each for each in wrong if not _OUTPUT_LAYER.search(each.partition(":")[0])
    ]  # one has it, the other ties it
    wrong += [
        f"{name}: expected {list(expected[name])}, found {list(shape)}"
        for name, shape in found.items()
        if name in expected and shape != expected[name]
    ]
    if wrong:
        raise SourceCorruptError(
            f"the weights of {checkpoint.source} do not fit those of --reference {reference.source}",
            details=wrong,
            file=reference.source,
            why="the reference is another model, or its vocabulary was resized or its layers renamed in training",
            next_step="name the directory of the model that was trained; --rename and --strip-prefix change names",
        )


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    params = checkpoint.model.params if checkpoint.model is not None else {}
    return {name: leaf.shape for name, leaf in params.items() if isinstance(leaf, Tensor)}
