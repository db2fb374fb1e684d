"""Reads the ``config.json`` of a Hugging Face model: the one beside the source, or that of ``--reference``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from fsdpckpt import flags
from fsdpckpt.errors import NeedsInformationError, SourceCorruptError
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.model_config import CONFIG
from fsdpckpt.options import AUTO_DTYPE, CASTABLE_DTYPES, ConvertOptions
from fsdpckpt.storage.sources import Sources


def stated_dtype(
    checkpoint: Checkpoint, options: ConvertOptions, sources: Sources
) -> tuple[str | None, tuple[Note, ...]]:
    """The dtype of ``--dtype``; for ``auto`` the one that ``config.json`` states, with a note.

    Raises NeedsInformationError if there is none that does.
    """
    if options.dtype != AUTO_DTYPE:
        return options.dtype, ()
    folders = folders_of(checkpoint, options)
    dtype = dtype_in(configuration_in(folders, sources))
    if dtype is None:
        raise NeedsInformationError(
            f"{flags.dtype('auto')}: no {CONFIG} states a dtype",
            details=[f"searched: {folder}" for folder in folders],
            next_step=f"{flags.dtype} bfloat16, or {flags.reference('DIR')} of the model that was trained",
        )
    note = Note("config-dtype", f"{flags.dtype('auto')} is {dtype}, as {CONFIG} states")
    return dtype, (note,)


def folders_of(checkpoint: Checkpoint, options: ConvertOptions) -> list[str]:
    """Where the ``config.json`` of the model may be, in order."""
    if options.reference is not None:
        return [options.reference]
    directory = checkpoint.origin.directory.rstrip("/")
    return [checkpoint.origin.directory, f"{directory}/huggingface"] if directory else []


def dtype_in(configuration: Mapping[str, object]) -> str | None:
    """The dtype of the weights, which transformers 5 calls ``dtype`` and older ones ``torch_dtype``."""
    stated = configuration.get("dtype", configuration.get("torch_dtype"))
    name = str(stated).removeprefix("torch.")
    return name if name in CASTABLE_DTYPES else None


def configuration_in(folders: Sequence[str], sources: Sources) -> Mapping[str, object]:
    """The language model's fields in the first ``config.json`` in ``folders``; empty if there is none."""
    for folder in folders:
        path = f"{folder.rstrip('/')}/{CONFIG}"
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
        fields = document if isinstance(document, dict) else {}
        text = fields.get("text_config")
        return {**fields, **text} if isinstance(text, dict) else fields
    return {}
