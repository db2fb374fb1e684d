"""Read what lies beside a checkpoint: ``fsdpckpt.json``, and the side files that its producer keeps there.

``fsdpckpt.json``, the manifest, is in every directory that this program wrote: key types, units, lengths, checksums and
digests. A damaged manifest is not used. One that contradicts the small files beside it (DCP's metadata, an index) means
that these are damaged, or that another program wrote there since; nothing says which. Side files are configurations,
tokenizers and logs: they are copied unchanged, without being opened.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdpckpt.errors import SourceMissingError
from fsdpckpt.ir.checkpoint import (
    Checkpoint,
    Evidence,
    EvidenceKind,
    Layout,
    Manifest,
    ManifestFile,
    Note,
    NoteKind,
    OptimState,
    Problem,
    ProblemKind,
    Section,
    SourceFile,
)
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.units import Units
from fsdpckpt.producers.forms import PLAIN, Flavor, RankFile
from fsdpckpt.producers.table import export_files, flavor_named, recognise
from fsdpckpt.readers.ignored import IgnoredFiles
from fsdpckpt.readers.protocol import MANIFEST, UNITS
from fsdpckpt.readers.units_beside import BesideUnits, units_in_manifest
from fsdpckpt.storage.protocols import Entry
from fsdpckpt.storage.sources import Sources

__all__ = [
    "SEAL",
    "SideFiles",
    "auxiliary",
    "check_listing",
    "describes_model",
    "files_of_model",
    "flavor_of",
    "listed",
    "manifest_units",
    "read_manifest",
    "side_files",
    "with_manifest",
    "with_units",
]

SEAL = ',\n "crc32": "'
"""Stands before the CRC-32 of all that precedes it; the manifest ends behind that."""

_SEAL_END = b'"\n}\n'
_CRC_DIGITS = 8
_MOST_DIGITS = 20  # of an id: Python refuses to read a number of thousands of them
_SMALL = (".metadata", ".json")  # files that are read anyway, whose bytes decide what the others mean
_CRC = re.compile("[0-9a-f]{8}")


def read_manifest(
    directory: str, names: Iterable[str], sources: Sources
) -> tuple[Manifest | None, tuple[Problem, ...]]:
    """The manifest in ``directory``, which holds files called ``names``; None when it is not there or is damaged."""
    document, problems = _document(directory, names, sources)
    return (_manifest(directory, document) if document is not None else None), problems


def with_manifest(checkpoint: Checkpoint, directory: str, names: Collection[str], sources: Sources) -> Checkpoint:
    """``checkpoint`` with what the manifest in ``directory``, which holds files called ``names``, says of it."""
    document, problems = _document(directory, names, sources)
    if document is None:
        notes = (Note("manifest", problem.message) for problem in problems)  # a conversion tells of these
        return replace(checkpoint, problems=(*checkpoint.problems, *problems), notes=(*checkpoint.notes, *notes))
    manifest = _manifest(directory, document)
    present = listed(manifest, sources)
    checkpoint.problems = (*checkpoint.problems, *check_listing(manifest, present))
    contradictions = _contradictions(manifest, present, sources)
    if contradictions:
        return replace(checkpoint, manifest=manifest, problems=(*checkpoint.problems, *contradictions))
    units = units_in_manifest(document, manifest.path)
    if units is not None:  # it was written with these very files
        with_units(checkpoint, units)
    optim = checkpoint.optim
    if document.get("key_type") == "id" and optim is not None:
        checkpoint.optim = _with_ids(optim)
    _forget_sharded(checkpoint, document.get("undetermined"))
    flavor = document.get("flavor")
    if isinstance(flavor, str) and flavor_named(flavor) is not None:
        checkpoint.flavor = flavor
    evidence = Evidence(EvidenceKind.MANIFEST, f"{MANIFEST}: written by fsdpckpt {document.get('version')}")
    return replace(checkpoint, manifest=manifest, evidence=(*checkpoint.evidence, evidence))


def manifest_units(directory: str, names: Iterable[str], sources: Sources) -> Units | None:
    """The units in the manifest of ``directory`` that say how the optimizers of the ranks differ, if it has such."""
    if MANIFEST not in names:
        return None
    source = sources.open(_path(directory))
    if b'"orders"' not in source.read(0, source.nbytes):
        return None
    document, _ = _document(directory, names, sources)
    units = units_in_manifest(document, _path(directory))
    return units.units if units is not None else None


def with_units(checkpoint: Checkpoint, beside: BesideUnits) -> None:
    """Give ``checkpoint`` the units that were found."""
    checkpoint.units, checkpoint.units_from = beside.units, beside.path
    if checkpoint.layout is Layout.FLATTENED or (checkpoint.optim is not None and checkpoint.optim.key_type == "id"):
        checkpoint.notes = (*checkpoint.notes, *beside.notes)  # where nothing is flat nobody needs to choose
    if beside.units is not None:
        evidence = Evidence(EvidenceKind.UNITS, f"{beside.path} says what lies in flat parameters")
        checkpoint.evidence = (*checkpoint.evidence, evidence)


def _document(
    directory: str, names: Iterable[str], sources: Sources
) -> tuple[dict[str, object] | None, tuple[Problem, ...]]:
    """The manifest's JSON; None when there is none, or when it is damaged, which the problems say."""
    if MANIFEST not in names:
        return None, ()
    path = _path(directory)
    source = sources.open(path)
    data = source.read(0, source.nbytes)
    if _seal_broken(data):
        return None, _damaged(path, "its bytes do not sum to the checksum at its end")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return None, _damaged(path, "it is no JSON")
    return (document, ()) if isinstance(document, dict) else (None, _damaged(path, "it is no JSON object"))


def _seal_broken(data: bytes) -> bool:
    """Whether the checksum at the end, or what it covers, was changed. A manifest written by hand may have none."""
    nbytes = len(SEAL) + _CRC_DIGITS + len(_SEAL_END)
    body, end = data[:-nbytes], data[-nbytes:]
    crc = b"%08x" % zlib.crc32(body)
    return end != SEAL.encode() + crc + _SEAL_END and (SEAL.encode() in end or crc in end)


def _path(directory: str) -> str:
    return f"{directory.rstrip('/')}/{MANIFEST}"


def _damaged(path: str, how: str) -> tuple[Problem, ...]:
    message = f"{path} is damaged, and nothing that it says is used: {how}"
    return (Problem("manifest", message, fatal=False, file=path),)


def _manifest(directory: str, document: Mapping[str, object]) -> Manifest:
    files, digests = _files(document.get("files")), _digests(document.get("digests"))
    return Manifest(_path(directory), directory.rstrip("/"), files, digests)


def _files(listed: object) -> dict[str, ManifestFile]:
    files: dict[str, ManifestFile] = {}
    for name, entry in listed.items() if isinstance(listed, dict) else ():
        nbytes, crc = (entry.get("nbytes"), entry.get("crc32")) if isinstance(entry, dict) else (None, None)
        if (
            isinstance(name, str)
            and _inside(name)
            and isinstance(nbytes, int)
            and isinstance(crc, str)
            and _CRC.fullmatch(crc)
        ):
            files[name] = ManifestFile(nbytes, int(crc, 16))
    return files


def _inside(name: str) -> bool:
    """Whether a file of this name lies in the directory; files elsewhere are never opened."""
    return "\0" not in name and not name.startswith("/") and not {"", ".", ".."} & set(name.split("/"))


def _digests(listed: object) -> dict[str, str]:
    entries = listed.items() if isinstance(listed, dict) else ()
    return {key: value for key, value in entries if isinstance(key, str) and isinstance(value, str)}


def _contradictions(manifest: Manifest, present: Collection[str], sources: Sources) -> list[Problem]:
    problems = []
    for name, listed in manifest.files.items():
        if name not in present or not name.endswith(_SMALL):
            continue
        source = sources.open(f"{manifest.directory}/{name}")
        if source.nbytes != listed.nbytes or zlib.crc32(source.read(0, source.nbytes)) != listed.crc:
            message = (
                f"{source.path} is not what {manifest.path} says of it: it is damaged, or another program wrote here "
                f"since (then remove {MANIFEST})"
            )
            problems.append(Problem("checksum", message, file=source.path))
    return problems


def _forget_sharded(checkpoint: Checkpoint, undetermined: object) -> None:
    """Where the source did not say whether FSDP shards a parameter, what was written from it does not say it either."""
    if not isinstance(undetermined, list) or checkpoint.model is None:
        return
    params = checkpoint.model.params
    for key in undetermined:
        leaf = params.get(key) if isinstance(key, str) else None
        if isinstance(leaf, Tensor):
            params[key] = replace(leaf, sharded=None)


def _with_ids(optim: OptimState) -> OptimState:
    """``optim`` with its ids as numbers: a container wrote them as strings, and there are no param groups."""
    if optim.param_groups or not all(
        isinstance(key, int) or (key.isdecimal() and len(key) < _MOST_DIGITS) for key in optim.state
    ):
        return optim
    return OptimState({int(key): states for key, states in optim.state.items()}, optim.param_groups, optim.extra)


_DECIDING = (".metadata", ".index.json")  # small, and without them the others mean nothing
_SECTIONS = ((Section.OPTIM, "optim"), (Section.EXTRA, "extra_state"), (Section.MODEL, "model"))


def check_listing(manifest: Manifest, present: dict[str, Entry]) -> list[Problem]:
    """Problems of files that are missing, of another length, or among the listed without being one of them.

    ``there``: what ``listed`` found. A missing file that describes a model without being part of it is not fatal.
    """
    problems: list[Problem] = []
    for name, listed in manifest.files.items():
        path = f"{manifest.directory}/{name}"
        entry = present.get(name)
        if entry is None:
            message = f"{path} is missing, and {MANIFEST} lists it (if that is meant, remove {MANIFEST} too)"
            fatal = name.endswith(_DECIDING) or not auxiliary(posixpath.basename(name))
            problems.append(Problem("missing-file", message, fatal=fatal, file=path, section=_section(name)))
        elif entry.nbytes != listed.nbytes:
            message = f"{path} has {entry.nbytes} bytes, and {MANIFEST} says {listed.nbytes}"
            kind: ProblemKind = "truncated" if entry.nbytes < listed.nbytes else "length"
            problems.append(Problem(kind, message, file=path, section=_section(name)))
    return [*problems, *_strays(manifest, present)]


def listed(manifest: Manifest, sources: Sources) -> dict[str, Entry]:
    """The files of every directory that the manifest names one in, by their path below its own."""
    files: dict[str, Entry] = {}
    for folder in sorted({"", *(posixpath.dirname(name) for name in manifest.files)}):
        path = posixpath.join(manifest.directory, folder).rstrip("/")
        entry = sources.stat(path)
        if entry is not None and entry.directory:
            for inner in sources.list_directory(path):
                if not inner.directory:
                    files[posixpath.join(folder, inner.name)] = inner
    return files


def _section(name: str) -> Section | None:
    """The one section that a file of this name holds; None where it may hold several."""
    return next((section for section, word in _SECTIONS if re.search(word, name)), None)


def _strays(manifest: Manifest, present: dict[str, Entry]) -> list[Problem]:
    """Problems of files like those of the checkpoint that were not written with it."""
    kinds = {os.path.splitext(name)[1] for name in manifest.files} - {"", ".json"}
    strays = [name for name in present if os.path.splitext(name)[1] in kinds and name not in manifest.files]
    return [
        Problem(
            "stray",
            f"{manifest.directory}/{name} is not among the files that {MANIFEST} lists: another save left it, or it "
            "was put there since",
            fatal=False,
            file=f"{manifest.directory}/{name}",
        )
        for name in sorted(strays)
    ]


# What the libraries of Hugging Face keep beside weights: every program that loads a model by its directory wants them.
_OF_THE_MODEL = re.compile(
    r"^(config|generation_config|tokenizer.*|special_tokens_map|added_tokens|vocab|chat_template|preprocessor_config|"
    r"processor_config|adapter_config)\.(json|jinja|model)$|^(vocab|merges)\.txt$|^(spiece|sentencepiece.*)\.model$"
)
_SHOWN = 8  # names in one note


def describes_model(name: str) -> bool:
    """Whether a file of this name is one that Hugging Face's libraries keep beside weights."""
    return _OF_THE_MODEL.match(name) is not None


@dataclass(slots=True)
class SideFiles:
    """``files``: by target name, each file's bytes as a tensor. ``sources``: the files that their chunks lie in."""

    files: dict[str, Tensor] = field(default_factory=dict)
    sources: list[SourceFile] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def add(self, files: Mapping[str, Entry], known: Sequence[SourceFile]) -> None:
        """Take ``files``, by target name. ``known``: the files of the checkpoint, of which some were read as extras."""
        numbers = {file.path: number for number, file in enumerate((*known, *self.sources))}
        for target_name, entry in files.items():
            if entry.path not in numbers:
                numbers[entry.path] = len(numbers)
                self.sources.append(SourceFile(entry.path, entry.nbytes))
            chunks = Chunks.whole(file=numbers[entry.path], offset=0, shape=(entry.nbytes,))
            self.files[target_name] = Tensor(DTYPES["uint8"], (entry.nbytes,), chunks)


def files_of_model(directory: str, known: Sequence[SourceFile], sources: Sources) -> SideFiles:
    """What Hugging Face's libraries keep beside weights, from ``directory``; nothing when it is a file.

    Raises SourceMissingError when it does not exist.
    """
    taken = SideFiles()
    entry = sources.stat(directory)
    if entry is None:
        raise SourceMissingError(f"--reference {directory} does not exist", file=directory)
    if entry.directory:
        entries = {one.name: one for one in sources.list_directory(directory) if describes_model(one.name)}
        taken.add({name: one for name, one in sorted(entries.items()) if not one.directory}, known)
    if taken.files:
        taken.notes.append(_note("carried", f"copied from {directory}", list(taken.files)))
    return taken


def side_files(
    checkpoint: Checkpoint, target: Flavor, world_size: int | None, sources: Sources, *, only: Section | None = None
) -> SideFiles:
    """Files beside ``checkpoint`` that belong into a target of the producer ``target``, for ``world_size`` ranks.

    From the same producer all are taken; rank r of the target gets the files of rank r modulo the source's ranks (with
    ``world_size`` None every rank keeps its files). From another producer only what Hugging Face keeps beside a model
    is taken, and with ``only`` nothing that means that both sections were saved. The notes list what was taken and what
    was not.
    """
    taken = SideFiles()
    if not checkpoint.directory:
        return taken
    source = flavor_named(checkpoint.flavor)
    entries = {entry.name: entry for entry in sources.list_directory(checkpoint.directory)}
    ignored = IgnoredFiles(checkpoint.source, checkpoint.ignored)
    entries = {name: entry for name, entry in entries.items() if not ignored.matches(entry.path)}
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
    if same and only is not None:
        pattern = "|".join(target.training_files)
        chosen = {name: name for name in chosen if not pattern or re.search(pattern, name) is None}
    if same:
        chosen = _by_rank(chosen, target.rank_files, world_size, taken)
    taken.add({target_name: files[name] for target_name, name in chosen.items()}, checkpoint.files)
    if chosen:
        taken.notes.append(_note("carried", "copied as they are", list(chosen)))
    used = {name.partition("/")[0] for name in chosen.values()}
    hidden = [name for name in sorted(entries) if name.startswith(".") and not _is_state(entries[name], source, set())]
    left = [*(name for name in beside if name not in used), *hidden]
    if left:
        taken.notes.append(_note("not-carried", f"not carried from {checkpoint.directory}", left))
    return taken


def _note(kind: NoteKind, what: str, names: list[str]) -> Note:
    shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    return Note(kind, f"{what}: {shown}", keys=tuple(names))


def _beside(entries: Mapping[str, Entry], flavor: Flavor | None, read: set[str]) -> dict[str, Entry]:
    """The files and directories that are not hidden and not part of the state."""
    return {
        name: entry
        for name, entry in sorted(entries.items())
        if not name.startswith(".") and not _is_state(entry, flavor, read)
    }


def _is_state(entry: Entry, flavor: Flavor | None, read: set[str]) -> bool:
    """Whether it is part of the state: by the producer's names, or else because it was ``read``."""
    if entry.name in (MANIFEST, UNITS, ".metadata"):
        return True
    return entry.path in read if flavor is None else re.search(flavor.state, entry.name) is not None


def _below(directory: Entry, name: str, sources: Sources) -> dict[str, Entry]:
    files: dict[str, Entry] = {}
    for entry in sorted(sources.list_directory(directory.path), key=lambda entry: entry.name):
        path = f"{name}/{entry.name}"
        if entry.directory:
            files.update(_below(entry, path, sources))
        else:
            files[path] = entry
    return files


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
        by_rank = {rank: name for name in chosen if (rank := kind.rank_of(name)) is not None}
        if kind.single in chosen and not by_rank:
            by_rank = {0: str(kind.single)}
        if not by_rank or world_size is None or sorted(by_rank) == list(range(world_size)):
            continue
        ranks = sorted(by_rank)
        chosen = {target: name for target, name in chosen.items() if name not in by_rank.values()}
        for rank in range(world_size):
            chosen[kind.of(rank, world_size)] = by_rank[ranks[rank % len(ranks)]]
        message = f"{kind.name}: rank r of {world_size} has that of rank r modulo {len(ranks)}"
        taken.notes.append(Note("inferred", message))
    return chosen


# Files beside a checkpoint that describe it or belong to other tools: they hold no state that a training job saves.
_NOT_STATE = re.compile(
    r"^(training_args\.bin|.*\.(json|txt|md|yaml|yml|py|model|jinja|log|csv|tiktoken|sh|html|toml|cfg|lock))$"
    r"|^(README|LICENSE|\..*)$",
    re.IGNORECASE,
)


def flavor_of(checkpoint: Checkpoint, names: Iterable[str], directory: str) -> str:
    """The producer that the file names show, or the keys beside model and optimizer; else ``plain``."""
    known = list(names)
    if MANIFEST in known:  # which says it itself
        return PLAIN
    flavor = recognise(
        known,
        directory=directory,
        keys=checkpoint.extra,
        model=checkpoint.nesting.get(Section.MODEL),
        flattened=checkpoint.flattened_keys,
    )
    return flavor.name if flavor is not None else PLAIN


def auxiliary(name: str) -> bool:
    """Whether a file of this name is no part of a checkpoint (configuration, tokenizer, log)."""
    return _NOT_STATE.match(name) is not None
