"""Finds the files beside a checkpoint: those to copy with it, and those that show which program saved what."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdpckpt import flags
from fsdpckpt.errors import SourceMissingError
from fsdpckpt.ir.checkpoint import Checkpoint, Evidence, EvidenceKind, Note, NoteKind, Problem, Section, SourceFile
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Stored, paths_in, require_stored, stored_by_number
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.ir.values import Key, find_value
from fsdpckpt.producers import EXTRA_STEM, PLAIN, Flavor, RankFileName, extra_keys
from fsdpckpt.producers.recognition import export_files, fits_any, flavor_named, recognise, recognise_folder
from fsdpckpt.readers.protocol import MANIFEST, UNITS
from fsdpckpt.storage import Entry, is_url
from fsdpckpt.storage.sources import Sources, is_in, relative_path
from fsdpckpt.text import names_text, reused_ranks

# Files that Hugging Face's libraries keep beside weights: every program that loads a model by its directory needs them.
_OF_THE_MODEL = re.compile(
    r"^(config|generation_config|tokenizer.*|special_tokens_map|added_tokens|vocab|chat_template|preprocessor_config|"
    r"processor_config|adapter_config)\.(json|jinja|model)$|^(vocab|merges)\.txt$|^(spiece|sentencepiece.*)\.model$"
)
_MAX_NAMES = 8  # names in one note


# Files beside a checkpoint that describe it or belong to other tools: they hold no state that a training job saves.
_NOT_STATE = re.compile(
    r"^(training_args\.bin|.*\.(json|txt|md|yaml|yml|py|model|jinja|log|csv|tiktoken|sh|html|toml|cfg|lock))$"
    r"|^(README|LICENSE|\..*)$",
    re.IGNORECASE,
)


def auxiliary(name: str) -> bool:
    """Whether a file of this name does not belong to a checkpoint (configuration, tokenizer, log)."""
    return _NOT_STATE.match(name) is not None


_SECTION_WORDS = {Section.OPTIM: "optim", Section.EXTRA: EXTRA_STEM, Section.MODEL: "model"}


def section_of_name(name: str) -> Section | None:
    """The one section that a file of this name holds; None if it may hold several."""
    return next((section for section, word in _SECTION_WORDS.items() if word in name), None)


def describes_model(name: str) -> bool:
    """Whether Hugging Face's libraries keep a file of this name beside weights."""
    return _OF_THE_MODEL.match(name) is not None


@dataclass(slots=True)
class SideFiles:
    """``files``: by target name, each file's bytes as a tensor. ``sources``: the source files that their chunks refer
    to, and that the checkpoint has not. ``copied``, ``left_out``: the paths of the source files that are copied, and of
    those that a note lists as left out. ``lacking``: as ``Checkpoint.lacking``.
    """

    files: dict[str, Tensor] = field(default_factory=dict)
    sources: list[SourceFile] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    copied: set[str] = field(default_factory=set)
    left_out: set[str] = field(default_factory=set)
    lacking: list[str] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The names that ``files`` make in the target, those of their directories included."""
        return {*self.files, *(name.partition("/")[0] for name in self.files)}

    def add(self, files: Mapping[str, Entry], files_read: Sequence[SourceFile]) -> None:
        """Add ``files``, by target name. ``files_read``: those of the checkpoint, some of which are extras."""
        numbers = {file.path: number for number, file in stored_by_number([*files_read, *self.sources]).items()}
        for target_name, entry in files.items():
            self.copied.add(entry.path)
            if entry.path not in numbers:
                numbers[entry.path] = len(files_read) + len(self.sources)
                self.sources.append(Stored(entry.path, entry.nbytes))
            chunks = Chunks.whole(file=numbers[entry.path], offset=0, shape=(entry.nbytes,))
            self.files[target_name] = Tensor(DTYPES["uint8"], (entry.nbytes,), chunks)


def files_of_model(directory: str, files_read: Sequence[SourceFile], sources: Sources) -> SideFiles:
    """The files in ``directory`` that Hugging Face's libraries keep beside weights; none if it is a file.

    Raises SourceMissingError if it does not exist.
    """
    chosen = SideFiles()
    entry = sources.stat(directory)
    if entry is None:
        raise SourceMissingError(f"{flags.reference(directory)} does not exist", file=directory)
    if entry.directory:
        entries = sources.list_directory(directory)
        chosen.add(
            {each.name: each for each in entries if describes_model(each.name) and not each.directory}, files_read
        )
    return chosen


def notes_on_copies(names: Iterable[str], files: Mapping[str, Tensor], checkpoint: Checkpoint) -> list[Note]:
    """Notes on the files ``names`` of a target, which are copies of ``files``, by the directory they come from."""
    from_places: dict[str, list[str]] = {}
    for name in names:
        path = _copied_path(files[name], checkpoint)
        beside = checkpoint.origin.directory and is_in(path, checkpoint.origin.directory)
        what = "copied unchanged" if beside else f"copied from {path.rpartition('/')[0] or '.'}"
        from_places.setdefault(what, []).append(name)
    return [_note("carried", what, listed) for what, listed in from_places.items()]


def with_copied(checkpoint: Checkpoint, files: Mapping[str, Tensor]) -> Checkpoint:
    """``checkpoint`` whose account says that ``files`` are copied."""
    paths = [relative_path(_copied_path(tensor, checkpoint), checkpoint.source) for tensor in files.values()]
    ledger = replace(checkpoint.ledger, account=checkpoint.ledger.account.with_copied(paths))
    return replace(checkpoint, ledger=ledger)


def _copied_path(tensor: Tensor, checkpoint: Checkpoint) -> str:
    return require_stored(checkpoint.files[int(tensor.chunks.file[0])]).path


def side_files(
    checkpoint: Checkpoint,
    target: Flavor,
    world_size: int | None,
    sources: Sources,
    *,
    only: Section | None = None,
    directory: bool = True,
) -> SideFiles:
    """The files beside ``checkpoint`` that belong in a target of the producer ``target``, for ``world_size`` ranks;
    none if the target is no ``directory``.

    From the same producer all are copied, and also if one's checkpoints are inside the other's; rank r of the target
    gets the files of rank r modulo the source's ranks (with ``world_size`` None every rank keeps its files). From
    another producer only the files that Hugging Face keeps beside a model are copied, and with ``only`` none that show
    that both sections were saved. The notes list what is not copied.
    """
    copied = SideFiles()
    if not checkpoint.origin.directory:
        return copied
    source = flavor_named(checkpoint.flavor)
    entries = {
        entry.name: entry
        for entry in sources.list_directory(checkpoint.origin.directory)
        if relative_path(entry.path, checkpoint.source) not in checkpoint.origin.ignored
    }
    read = set(paths_in(checkpoint.files))
    beside = {
        name: entry
        for name, entry in sorted(entries.items())
        if not name.startswith(".")
        and entry.path not in checkpoint.origin.section_files
        and not _is_state(entry, source, read)
    }
    files = dict(beside)
    same = source is not None and (
        source.name in (target.name, *target.contained_in) or target.name in (source.name, *source.contained_in)
    )
    folders = [name for name in files if entries[name].directory]
    for name in folders:
        del files[name]
    if source is not None:
        with_files = [f"{name}/" for name in source.side_directories if same]
        for name in (*with_files, *filter(None, [source.model_files])):
            files.update(files_below(checkpoint.origin.directory, name, sources))
        for name in source.side_places if same else ():
            below = files_below(checkpoint.origin.directory, f"{name}/", sources)
            files.update({path: file for path, file in below.items() if re.search(source.side_files, path)})
    exports = export_files(entries)  # they hold another copy of the model, unchanged
    chosen = {name: name for name in files if name not in exports} if same else _of_the_model(files, source, target)
    if same and only is not None:
        pattern = "|".join(target.training_files)
        chosen = {name: name for name in chosen if not pattern or re.search(pattern, name) is None}
    if not directory:
        chosen = {}
    if same:
        chosen = _by_rank(chosen, target.rank_files, world_size, copied)
    copied.add({target_name: files[name] for target_name, name in chosen.items()}, checkpoint.files)
    used = {name.partition("/")[0] for name in chosen.values()}
    hidden = [name for name in sorted(entries) if name.startswith(".") and not _is_state(entries[name], source, set())]
    left_out = [name for name in (*beside, *hidden) if name not in used]
    copied.left_out.update(entries[name].path for name in left_out)
    if left_out:
        copied.notes.append(_note("not-carried", f"not copied from {checkpoint.origin.directory}", left_out))
    return copied


def files_below(directory: str, name: str, sources: Sources) -> dict[str, Entry]:
    """The files in the directory ``name``, which ends with a slash, of ``directory``, by their paths from there."""
    path = f"{directory.rstrip('/')}/{name.rstrip('/')}"
    entry = sources.stat(path)
    if entry is None or not entry.directory:
        return {}
    return {f"{name}{below}": file for below, file in sources.files_below(path)}


def _note(kind: NoteKind, what: str, names: list[str]) -> Note:
    return Note(kind, f"{what}: {names_text(names, _MAX_NAMES)}", keys=tuple(names))


def _is_state(entry: Entry, flavor: Flavor | None, read: set[str]) -> bool:
    """Whether it is part of the state: by the producer's names, or because it was ``read``."""
    if entry.name in (MANIFEST, UNITS, ".metadata"):
        return True
    if entry.directory and any(path.startswith(f"{entry.path}/") for path in read):
        return True
    return entry.path in read if flavor is None else re.search(flavor.state, entry.name) is not None


def _of_the_model(files: Iterable[str], source: Flavor | None, target: Flavor) -> dict[str, str]:
    """Target name to source name for Hugging Face's own files, if the target's producer keeps them. A source whose
    producer keeps none may have some beside it, by their usual names.
    """
    if target.model_files is None:
        return {}
    prefix = (source.model_files if source is not None else None) or ""
    names = {name.removeprefix(prefix): name for name in files if name.startswith(prefix)}
    return {target.model_files + bare: name for bare, name in names.items() if _OF_THE_MODEL.match(bare)}


def _by_rank(
    chosen: dict[str, str], rank_files: tuple[RankFileName, ...], world_size: int | None, copied: SideFiles
) -> dict[str, str]:
    """``chosen`` with the rank files for ``world_size`` ranks."""
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
        if world_size > len(ranks):
            new, old = reused_ranks(len(ranks), world_size)
            files = "file" if world_size == len(ranks) + 1 else "files"
            copied.notes.append(Note("inferred", f"{kind.name}: {new} the {files} of {old}"))
    return chosen


def missing_sections(checkpoint: Checkpoint, names: Iterable[str]) -> list[Problem]:
    """A fatal problem if the model or the optimizer is absent, and a scheduler or random states show that both were
    saved; a problem that is not fatal if the framework would start without the optimizer.

    ``names``: of the files beside the checkpoint. A save of the model alone has no such files and no such extras. What
    this program wrote records which sections it has.
    """
    flavor, names = flavor_named(checkpoint.flavor), sorted(names)
    if names and not checkpoint.has(Section.OPTIM) and has_zero_optimizer_elsewhere(checkpoint.extra):
        return [zero_optimizer_missing(checkpoint.source)]
    if flavor is None:
        return []
    absent = [
        (section, what)
        for section, what in ((Section.MODEL, "model"), (Section.OPTIM, "optimizer"))
        if not checkpoint.has(section)
    ]
    files = [name for name in names if fits_any(flavor.training_files, name)]
    beside = [*files, *(key for key in flavor.training_keys if find_value(checkpoint.extra, extra_keys(key)))]
    place = checkpoint.origin.directory or checkpoint.source
    if not absent and MANIFEST not in names and _has_optimizer(flavor, names, checkpoint.world_size):
        return [
            Problem("missing-file", message, fatal=False, file=place, section=Section.OPTIM)
            for message in missing_file_warnings(f"{place} has ", flavor, names)
        ]
    if len(absent) != 1 or not beside:
        return []
    section, what = absent[0]
    file = _file_of(section, flavor, checkpoint)
    what += f" ({file})" if file else ""
    message = f"{place} has no {what}, with which {flavor.name} always saves {names_text(beside, 3)}"
    return [Problem("missing-section", message, section=section)]


def has_zero_optimizer_elsewhere(extra: Mapping[Key, object]) -> bool:
    """Whether ``extra``, of DeepSpeed's module states, are of a run with ZeRO, which alone records ``param_shapes`` and
    has the optimizer in files of the ranks.
    """
    return "ds_version" in extra and bool(extra.get("param_shapes")) and extra.get("optimizer") is None


def zero_optimizer_missing(source: str) -> Problem:
    """The problem of module states without the ranks' files."""
    message = (
        f"{source} has no *_optim_states.pt: DeepSpeed's ZeRO has the optimizer there, and the float32 weights, of "
        "which the module has copies in the dtype that it computed with"
    )
    return Problem("missing-section", message, section=Section.OPTIM)


def _has_optimizer(flavor: Flavor, names: Sequence[str], ranks: int) -> bool:
    """Whether the optimizer is a file or a directory of its own, as in one of the framework's forms."""
    places = [form.optim.file.format(rank=0, world_size=ranks).rstrip("/") for form in flavor.forms if form.optim]
    return any(place in names for place in places)


def missing_file_warnings(where: str, flavor: Flavor, names: Collection[str]) -> list[str]:
    """What the framework does if a file that it needs is not among ``names``. ``where``: "the target has ", or ""."""
    return [f"{where}no {file}: without it {flavor.name} {what}" for file, what in flavor.needed if file not in names]


def _file_of(section: Section, flavor: Flavor, checkpoint: Checkpoint) -> str:
    """The file of the section in the form that the rest has; "" if it has no file of its own."""
    for form in flavor.forms:
        place = form.model if section is Section.MODEL else form.optim
        if form.container == checkpoint.container and place is not None:
            return place.file.format(rank=0, world_size=checkpoint.world_size)
    return ""


def with_flavor(checkpoint: Checkpoint, names: Sequence[str], directory: str) -> Checkpoint:
    """``checkpoint``, found in ``directory`` ("": it is one file), with the name of its producer."""
    checkpoint.origin = replace(checkpoint.origin, directory=directory)
    if checkpoint.flavor == PLAIN and MANIFEST not in names:  # which records it
        checkpoint.origin = replace(checkpoint.origin, flavor=flavor_of(checkpoint, names, directory))
    flavor = flavor_named(checkpoint.flavor)
    if flavor is None or not directory:
        checkpoint.ledger = checkpoint.ledger.with_notes(*_part_of_larger_checkpoint(checkpoint.source))
    if flavor is not None:
        evidence = Evidence(EvidenceKind.FLAVOR, f"flavor {flavor.name}: names of {flavor.title}")
        checkpoint.ledger = checkpoint.ledger.with_evidence(evidence)
    return checkpoint


def flavor_of(checkpoint: Checkpoint, names: Sequence[str], directory: str) -> str:
    """The producer according to the file names, or to the keys beside model and optimizer; else ``plain``."""
    nesting, flattened = checkpoint.origin.nesting, checkpoint.origin.flattened_keys
    model, optim = nesting.get(Section.MODEL), nesting.get(Section.OPTIM)
    sections = [*checkpoint.origin.nesting.values(), *(named.path for named in checkpoint.named)]
    keys = {*checkpoint.extra, *(path[0] for path in sections if path)}
    flavor = recognise(names, directory=directory, keys=keys, model=model, optim=optim, flattened=flattened)
    return flavor.name if flavor is not None else PLAIN


def _part_of_larger_checkpoint(source: str) -> list[Note]:
    """A note if a framework keeps one section in ``source`` and the others in the directory above, from which it
    resumes.
    """
    if is_url(source):
        return []
    above, name = os.path.split(os.path.abspath(source))
    flavor = resuming_producer(os.listdir(above) if os.access(above, os.R_OK) else [])
    if flavor is None or not re.search(flavor.state, name):
        return []
    folder = os.path.dirname(source.rstrip("/")) or "."
    message = f"{source} is one part of a checkpoint of flavor {flavor.name}: give {folder} for all of it"
    return [Note("part-of", message)]


def resuming_producer(names: Sequence[str]) -> Flavor | None:
    """The producer of files with these names, if it resumes training from them."""
    flavor = recognise(names) or recognise_folder(names)
    return flavor if flavor is not None and any(form.optim is not None for form in flavor.forms) else None
