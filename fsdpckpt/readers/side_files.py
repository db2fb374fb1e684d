"""Files beside a checkpoint that a producer keeps with it: found, and read as the bytes that they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fsdpckpt.ir.checkpoint import Checkpoint, Note, SourceFile
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.producers.forms import PLAIN, Flavor, RankFile
from fsdpckpt.producers.table import export_files, flavor_named, recognise
from fsdpckpt.storage.sources import Entry, Sources

__all__ = ["EXTRA_STEM", "MANIFEST", "SideFiles", "UNITS", "auxiliary", "flavor_of", "side_files"]

# What the libraries of Hugging Face keep beside weights: every program that loads a model by its directory wants them.
_OF_THE_MODEL = re.compile(
    r"^(config|generation_config|tokenizer.*|special_tokens_map|added_tokens|vocab|chat_template|preprocessor_config|"
    r"processor_config|adapter_config)\.(json|jinja|model)$|^(vocab|merges)\.txt$|^(spiece|sentencepiece.*)\.model$"
)
_SHOWN = 8  # names in one note


@dataclass(slots=True)
class SideFiles:
    """``files``: target name to the file's bytes as a tensor of them. ``sources``: what their chunks lie in."""

    files: dict[str, Tensor] = field(default_factory=dict)
    sources: list[SourceFile] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)


def side_files(checkpoint: Checkpoint, target: Flavor, world_size: int | None, sources: Sources) -> SideFiles:
    """Files beside ``checkpoint`` that belong into a target of the producer ``target``, for ``world_size`` ranks.

    The same producer's are taken as they are; those of ranks go by rank r of the target from rank r modulo the
    source's ranks (None: all stay). Of another producer's only what Hugging Face keeps beside a model is taken. What
    is not is in the notes.
    """
    taken = SideFiles()
    if not checkpoint.directory:
        return taken
    source = flavor_named(checkpoint.flavor)
    entries = {entry.name: entry for entry in sources.list_directory(checkpoint.directory)}
    beside = _beside(entries, source, {file.path for file in checkpoint.files})
    files = dict(beside)
    for name in list(files):
        if entries[name].directory:
            del files[name]
            if source is not None and name in source.export_directories:
                files.update(_below(entries[name], name, sources))
    same = source is not None and source.name == target.name
    exports = export_files(entries)  # they hold the model once more, as it was
    chosen = {name: name for name in files if name not in exports} if same else _of_the_model(files, source, target)
    if same:
        chosen = _by_rank(chosen, target.rank_files, world_size, taken)
    numbers = {file.path: number for number, file in enumerate(checkpoint.files)}  # some were read, as extras
    for target_name, name in chosen.items():
        path, nbytes = files[name].path, files[name].nbytes
        if path not in numbers:
            numbers[path] = len(numbers)
            taken.sources.append(SourceFile(path, nbytes))
        chunks = Chunks.whole(file=numbers[path], offset=0, shape=(nbytes,))
        taken.files[target_name] = Tensor(DTYPES["uint8"], (nbytes,), chunks)
    if chosen:
        taken.notes.append(_note("carried", "copied as they are", list(chosen)))
    used = {name.partition("/")[0] for name in chosen.values()}
    hidden = [name for name in sorted(entries) if name.startswith(".") and not _is_state(entries[name], source, set())]
    left = [*(name for name in beside if name not in used), *hidden]
    if left:
        taken.notes.append(_note("not-carried", f"not carried from {checkpoint.directory}", left))
    return taken


def _note(kind: str, what: str, names: list[str]) -> Note:
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return Note(kind, f"{what}: {shown}", keys=tuple(names))


def _beside(entries: Mapping[str, Entry], flavor: Flavor | None, read: set[str]) -> dict[str, Entry]:
    """What is to be seen beside the state itself."""
    return {
        name: entry
        for name, entry in sorted(entries.items())
        if not name.startswith(".") and not _is_state(entry, flavor, read)
    }


def _is_state(entry: Entry, flavor: Flavor | None, read: set[str]) -> bool:
    """By the producer's names; without a producer what was ``read``."""
    if entry.name in (MANIFEST, UNITS, ".metadata"):
        return True
    return entry.path in read if flavor is None else re.search(flavor.state, entry.name) is not None


def _below(directory: Entry, name: str, sources: Sources) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for entry in sorted(sources.list_directory(directory.path), key=lambda entry: entry.name):
        path = f"{name}/{entry.name}"
        if entry.directory:
            found.update(_below(entry, path, sources))
        else:
            found[path] = entry
    return found


def _of_the_model(files: Iterable[str], source: Flavor | None, target: Flavor) -> dict[str, str]:
    """Target name to source name of Hugging Face's own files, where both producers keep them."""
    if source is None or source.model_files is None or target.model_files is None:
        return {}
    prefix = source.model_files
    names = {name.removeprefix(prefix): name for name in files if name.startswith(prefix)}
    return {target.model_files + bare: name for bare, name in names.items() if _OF_THE_MODEL.match(bare)}


def _by_rank(
    chosen: dict[str, str], rank_files: tuple[RankFile, ...], world_size: int | None, taken: SideFiles
) -> dict[str, str]:
    """``chosen`` with the files of ranks for ``world_size`` ranks."""
    for kind in rank_files:
        own = {rank: name for name in chosen if (rank := kind.rank_of(name)) is not None}
        if kind.single in chosen and not own:
            own = {0: str(kind.single)}
        if not own or world_size is None or sorted(own) == list(range(world_size)):
            continue
        ranks = sorted(own)
        chosen = {target: name for target, name in chosen.items() if name not in own.values()}
        for rank in range(world_size):
            chosen[kind.of(rank, world_size)] = own[ranks[rank % len(ranks)]]
        message = f"{kind.name}: rank r of {world_size} has that of rank r modulo {len(ranks)}"
        taken.notes.append(Note("inferred", message))
    return chosen


MANIFEST = "fsdpckpt.json"
UNITS = "units.json"  # what save_units calls its file in a directory
EXTRA_STEM = "extra_state"  # of the rank files, verl's and this program's, that hold extras and nothing else

# Files beside a checkpoint that describe it or belong to other tools: they hold no state that a training job saves.
_NOT_STATE = re.compile(
    r"^(training_args\.bin|.*\.(json|txt|md|yaml|yml|py|model|jinja|log|csv|tiktoken|sh|html|toml|cfg|lock))$"
    r"|^(README|LICENSE|\..*)$",
    re.IGNORECASE,
)


def flavor_of(names: Iterable[str], directory: str, keys: Iterable[object] = ()) -> str:
    """The producer whose file names these clearly are, or whose ``keys`` beside model and optimizer; else ``plain``."""
    known = list(names)
    if MANIFEST in known:  # which says it itself
        return PLAIN
    flavor = recognise(known, directory=directory, keys=keys)
    return flavor.name if flavor is not None else PLAIN


def auxiliary(name: str) -> bool:
    """Whether a file of this name is no part of a checkpoint (configuration, tokenizer, log)."""
    return _NOT_STATE.match(name) is not None
