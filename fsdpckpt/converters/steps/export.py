"""Prepares weights for ``from_pretrained``: tied weights once, and the model's own files beside them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.converters.target.model_files import configuration_in, dtype_in, folders_of
from fsdpckpt.errors import SourceUnrecognisedError, SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, Note
from fsdpckpt.ir.model_config import CONFIG, WORD_EMBEDDINGS, disagreements
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.options import ConvertOptions
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.readers.side_files import files_of_model
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.elements import first_difference
from fsdpckpt.writers.torch_full import ties

# The weight that transformers leaves out of a model with tied embeddings.
_OUTPUT_LAYER = re.compile(r"(^|\.)lm_head\.weight$")
_NEEDED = (
    f"from_pretrained also needs {CONFIG} and the tokenizer files; the source has none: add {flags.reference('DIR')}, "
    "the directory of the model that was trained"
)


def export(draft: Draft, decision: Decision) -> Draft:
    """Make weights ready for ``from_pretrained``: tied weights once, and the files of the model beside them.

    ``--reference`` names a directory whose configuration, tokenizer and generation settings replace those beside the
    source; if it holds weights, their names and shapes must match. Raises SourceUnsupportedError if they do not or if
    its configuration states other sizes, SourceMissingError if the directory does not exist.
    """
    if decision.form is None or not decision.form.weights:
        return draft
    options, sources, reference = decision.options, draft.sources, decision.options.reference
    folders = folders_of(draft.checkpoint, options)
    beside = draft if reference is None else _with_files_of(reference, draft)
    if CONFIG not in beside.side_files:
        described = beside.checkpoint.lacks(_NEEDED)
    else:
        described = _with_note_on_dtype(beside.checkpoint, folders, options, sources)
    return replace(beside, checkpoint=_without_tied_copies(described, folders, sources, reference))


def _with_files_of(reference: str, draft: Draft) -> Draft:
    """``draft`` with the files of the model in the directory ``reference``, which must describe it."""
    checkpoint, sources = draft.checkpoint, draft.sources
    of_model = files_of_model(reference, checkpoint.files, sources)
    with_files = replace(checkpoint, files=(*checkpoint.files, *of_model.sources)).noted(*of_model.notes)
    _check_against(reference, with_files, sources)
    _check_configuration(reference, with_files, sources)
    return replace(draft, checkpoint=with_files, side_files={**draft.side_files, **of_model.files})


def _with_note_on_dtype(
    checkpoint: Checkpoint, folders: Sequence[str], options: ConvertOptions, sources: Sources
) -> Checkpoint:
    """``checkpoint`` with a note if the weights are written in another dtype than the configuration states."""
    stated = dtype_in(configuration_in(folders, sources))
    params = checkpoint.params.values()
    floating = [leaf.dtype.name for leaf in params if isinstance(leaf, Tensor) and leaf.dtype.floating]
    written = [options.dtype] * len(floating) if options.dtype is not None else floating
    others = [dtype for dtype in written if dtype != stated]
    if stated is None or not others:
        return checkpoint
    what = "the weights" if len(others) == len(written) else f"{len(others)} of {len(written)} weights"
    dtypes = " and ".join(dict.fromkeys(others))
    message = (
        f"{what} are written as {dtypes}, and {CONFIG} says {stated}: {flags.dtype('auto')} casts them to {stated}"
    )
    return checkpoint.noted(Note("config-dtype", message))


def _check_against(reference: str, checkpoint: Checkpoint, sources: Sources) -> None:
    try:
        opened = open_checkpoint(reference, sources=sources, locate=Locate.NOTHING)
    except SourceUnrecognisedError:  # a configuration and a tokenizer, and no weights
        return
    if opened.model is not None:
        _require_fitting(checkpoint, opened)


def _check_configuration(reference: str, checkpoint: Checkpoint, sources: Sources) -> None:
    """Raises SourceUnsupportedError if ``config.json`` in ``reference`` states sizes that differ from the weights'.

    Compares fields whose weights all have one size, and models with one stack of layers (``ir.model_config``).
    """
    document = configuration_in([reference], sources)
    shapes = checkpoint.shapes
    wrong = [
        f"{each.field}: expected {each.found}, {each.what}, found {each.stated}"
        for each in disagreements(document, shapes)
    ]
    causal = any(str(name).endswith("ForCausalLM") for name in _list(document.get("architectures")))
    embeddings = {shape for name, shape in shapes.items() if WORD_EMBEDDINGS.search(name)}
    output_layer = any(  # by any name
        shape in embeddings and not WORD_EMBEDDINGS.search(name) for name, shape in shapes.items()
    )
    if document.get("tie_word_embeddings") is False and causal and embeddings and not output_layer:
        wrong.append("tie_word_embeddings: expected true, as there is no output layer (lm_head), found false")
    if wrong:
        path = f"{reference.rstrip('/')}/{CONFIG}"
        raise SourceUnsupportedError(
            f"{path} does not describe the model in {checkpoint.source}",
            details=wrong,
            file=path,
            why=f"{flags.reference} names another model, or training has resized the model or its vocabulary",
            next_step=f"name the directory of the trained model, or change these fields in a copy of {reference}",
        )


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else ()


def _without_tied_copies(
    checkpoint: Checkpoint, folders: Sequence[str], sources: Sources, reference: str | None
) -> Checkpoint:
    """Drop the second copy of tied weights: of those that share memory, and of the output layer if the model's
    configuration ties it to the word embeddings and the bytes are equal.

    FSDP saves tied weights under both names, each with its own bytes. If the copies differ, both stay, with a note.
    ``folders``: where to look for the configuration, in order.
    """
    model = checkpoint.model
    if model is None:
        return checkpoint
    tied_to = ties([leaf for leaf in model.params.values() if isinstance(leaf, Tensor)])
    first_names: dict[Tensor, str] = {}
    left_out: dict[str, str] = {}  # each with the name that stays
    for name, leaf in model.params.items():
        if isinstance(leaf, Tensor):
            first = first_names.setdefault(tied_to.get(leaf, leaf), name)
            if first != name:
                left_out[name] = first
    notes: list[Note] = []
    if configuration_in(folders, sources).get("tie_word_embeddings") is True:
        pair, differing = _tied_by_configuration(checkpoint, model, left_out, sources, reference)
        left_out |= pair
        notes += differing
    values = [name for name, leaf in model.params.items() if not isinstance(leaf, Tensor)]
    notes += [Note("tied", f"{name} is left out: it is tied to {first}", name) for name, first in left_out.items()]
    notes += [Note("dropped", f"{name} is left out: it is not a tensor", name) for name in values]
    params = {name: leaf for name, leaf in model.params.items() if name not in left_out and name not in values}
    return replace(checkpoint, model=ModelState(params)).noted(*notes)


def _tied_by_configuration(
    checkpoint: Checkpoint, model: ModelState, left_out: Collection[str], sources: Sources, reference: str | None
) -> tuple[dict[str, str], list[Note]]:
    """The output layer with the name of the word embeddings, which ``config.json`` ties it to, if their bytes agree;
    else a note. Raises SourceUnsupportedError if they do not and the configuration is that of ``reference``.
    """
    heads = [name for name in model.params if _OUTPUT_LAYER.search(name) and name not in left_out]
    embeddings = [name for name in model.params if WORD_EMBEDDINGS.search(name)]
    if len(heads) != 1 or len(embeddings) != 1:
        return {}, []
    head, embedding = model.params[heads[0]], model.params[embeddings[0]]
    if not isinstance(head, Tensor) or not isinstance(embedding, Tensor) or head.shape != embedding.shape:
        return {}, []
    if head.dtype == embedding.dtype:
        files = (checkpoint.files, sources)
        if first_difference((head, *files), (embedding, *files), None) is None:
            return {heads[0]: embeddings[0]}, []
    if reference is not None:
        path = f"{reference.rstrip('/')}/{CONFIG}"
        raise SourceUnsupportedError(
            f"{path} does not describe the model in {checkpoint.source}: it ties {heads[0]} to {embeddings[0]}, and "
            "their values differ",
            file=path,
            key=heads[0],
            expected="tie_word_embeddings: false",
            found="true",
            why="from_pretrained would drop the output layer that was trained",
            next_step=f"name the directory of the trained model, or change the field in a copy of {reference}",
        )
    message = f"{CONFIG} ties {heads[0]} to {embeddings[0]}, and their values differ: both are written"
    return {}, [Note("tied", message, heads[0])]


def _require_fitting(checkpoint: Checkpoint, reference: Checkpoint) -> None:
    """Raises SourceUnsupportedError that lists every weight whose name or shape differs from the reference's."""
    shapes, expected = checkpoint.shapes, reference.shapes
    wrong = [f"{name}: not in {reference.source}" for name in shapes if name not in expected]
    wrong += [f"{name}: not in {checkpoint.source}" for name in expected if name not in shapes]
    # Tied weights: only one of the two may have the output layer.
    wrong = [each for each in wrong if not _OUTPUT_LAYER.search(each.partition(":")[0])]
    wrong += [
        f"{name}: expected {list(expected[name])}, found {list(shape)}"
        for name, shape in shapes.items()
        if name in expected and shape != expected[name]
    ]
    if wrong:
        raise SourceUnsupportedError(
            f"the weights of {checkpoint.source} do not fit those of {flags.reference(reference.source)}",
            details=wrong,
            file=reference.source,
            why="the reference is another model, or its vocabulary was resized or its layers renamed in training",
            next_step=f"name the directory of the model that was trained; {flags.rename} and {flags.strip_prefix} "
            "change names",
        )
