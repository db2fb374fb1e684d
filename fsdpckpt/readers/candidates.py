"""Says what to do if several containers may be the model or the optimizer: what belongs together, and what to choose.

Files that differ in the number of a rank, a stage, an expert or a shard are parts of one model, whatever else they are.
No message proposes to read one of them, or to leave one out.
"""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from fsdpckpt import flags
from fsdpckpt.errors import (
    FsdpckptError,
    NeedsInformationError,
    SeveralCheckpointsError,
    SourceError,
    SourceIncompleteError,
    SourceUnsupportedError,
    to_copy,
)
from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.producers.recognition import recognise
from fsdpckpt.readers.counters import RANKS, counted_in_name, counted_parts
from fsdpckpt.readers.parts import ReadPart
from fsdpckpt.readers.protocol import Part
from fsdpckpt.readers.recorded_parts import TO_TORCH_DIST, deepspeed_ranks, parallel_sizes
from fsdpckpt.storage import Entry, is_url
from fsdpckpt.storage.sources import Sources, is_in, relative_path
from fsdpckpt.text import is_or_are, natural, plural, some_of

MAX_CANDIDATES = 3  # that a message lists
_EACH_FILE = "each of them is a checkpoint"
_EACH = "each of these directories is a checkpoint"
_MAX_POINTER_BYTES = 1024
_NUMBERS = re.compile(r"\d+")
_IN_DIRECTORY_OF_RANK = re.compile(r"(?:(.*)/)?(rank[-_]?\d+)/([^/]+\.(?:pt|pth|bin|ckpt))")
_POINTER = re.compile(r"^latest", re.IGNORECASE)  # of DeepSpeed, Megatron, verl
_STEP = re.compile(r"[\w.=+-]*\d[\w.=+-]*")


def refuse_counted_parts(source: str, labels: Sequence[str]) -> None:
    """Raises SourceUnsupportedError if some of ``labels`` are parts of one model, each with tensors of its own."""
    relative = {relative_path(label, source) or label: label for label in labels}
    counted = counted_parts(relative)
    if counted is None:
        return
    kind, parts = counted
    if kind == RANKS:
        refuse_directories_of_ranks(source, [relative[part] for part in parts])
    raise SourceUnsupportedError(
        f"{source} contains one model in parts: the files of {len(parts)} {kind}",
        details=[relative[part] for part in parts],
        most_shown=MAX_CANDIDATES,
        file=source,
        why="each contains plain tensors, and how to join them is defined in the model's code, not in the files",
        next_step="merge them with the script of the trainer that wrote them; or save DTensors, or a DCP checkpoint, "
        "which record it",
    )


def refuse_directories_of_ranks(source: str, labels: Sequence[str]) -> None:
    """Raises SourceUnsupportedError if some of ``labels`` are files of one name in a directory for each rank: in one
    directory they are read as what they hold, DTensors or slices.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for label in labels:
        match = _IN_DIRECTORY_OF_RANK.fullmatch(label)
        if match is not None:
            found.setdefault((match[1], match[3]), []).append(label)
    (above, name), paths = max(found.items(), key=lambda each: len(each[1]), default=(("", ""), []))
    if len(paths) < 2 or is_url(source):
        return
    files = f"{shlex.quote(above or '.')}/*rank*/*{posixpath.splitext(name)[1]}"
    target = 'ranks/$(basename "${f%.*}")_$(basename "$(dirname "$f")").${f##*.}'
    raise SourceUnsupportedError(
        f"{source} contains the files of {len(paths)} ranks, each in a directory of its own",
        details=paths,
        most_shown=MAX_CANDIDATES,
        file=source,
        why="files of ranks are read from one directory, where the name of each ends with its rank",
        next_step=to_copy(
            "link them there, and convert that directory",
            f'mkdir ranks; for f in {files}; do ln "$f" "{target}"; done',
        ),
    )


def _refuse_named_parts(source: str, places: Sequence[str]) -> None:
    """Raises SourceUnsupportedError if the names of files say that they are parts of one model, or of one of its
    weights.
    """
    counted = {}
    for place in places:
        found = counted_in_name(relative_path(place, source) or place)
        if found:
            counted[place] = found
    several = {place for place, (_, total) in counted.items() if total > 1}
    if not several and len(counted) < 2:
        return
    kind, total = max(counted.values(), key=lambda found: found[1])
    what = f"{total} {kind}" if several else "a model that is saved weight by weight"
    raise SourceUnsupportedError(
        f"{source} contains one model in parts: the files of {what}",
        details=sorted(counted, key=natural),
        most_shown=MAX_CANDIDATES,
        file=source,
        why="their names number the parts, and how to join them is defined in the trainer's code, not in the files",
        next_step="give the whole step of nanotron, with its checkpoint_metadata.json; else convert it with the script "
        "of the trainer that wrote it",
    )


def _refuse_recorded_part(part: ReadPart) -> None:
    """Raises SourceUnsupportedError if the content of ``part`` says that it is one of several parts of a model.

    Megatron-LM's torch format (``mp_rank_00/model_optim_rng.pt``) has plain tensors and the arguments of the run.
    """
    root = part.tree.root
    if part.tree.container != Container.TORCH or part.tree.layout is not Layout.FULL or not isinstance(root, dict):
        return
    ranks = deepspeed_ranks(root)
    if ranks > 1:
        raise SourceIncompleteError(
            f"{part.label} is one part of a DeepSpeed checkpoint of {ranks} tensor-parallel ranks",
            details=[f"its mp_world_size is {ranks}"],
            file=part.label,
            why="the parameters are divided among the files of all ranks",
            next_step="give the directory with the files of all ranks",
        )
    sizes = parallel_sizes(root, part.label)
    if sizes:
        raise SourceUnsupportedError(
            f"{part.label} is one part of a model",
            details=[f"its arguments say {name}={size}" for name, size in sizes.items()],
            file=part.label,
            why="each contains plain tensors, and how to join them is defined in the model's code, not in the files",
            next_step="give the directory of the iteration (iter_0000500) with the files of all ranks; or "
            f"{TO_TORCH_DIST}",
        )


def require_one_each(source: str, parts: Sequence[ReadPart], sources: Sources) -> None:
    """Raises if several of ``parts`` hold a model, or an optimizer, or if the name of one says that it holds a part:
    SourceUnsupportedError for parts of one model, SourceIncompleteError for slices without rank 0's, else
    NeedsInformationError.
    """
    for what in ("model", "optimizer"):
        candidates = [part for part in parts if what in part.section_names]
        _refuse_named_parts(source, [_place(part.origin) for part in candidates])
        for candidate in candidates:
            _refuse_recorded_part(candidate)
        if len(candidates) == 1 and candidates[0].label == source:
            continue  # all that was asked for
        _refuse_slices_without_rank_0(source, candidates)
        if len(candidates) < 2:
            continue
        refuse_counted_parts(source, [_place(part.origin) for part in candidates])
        labels = sorted((part.label for part in candidates), key=natural)
        what_is_wrong = f"{source} contains {len(labels)} candidates for the {what}"
        why = (
            "several checkpoints are in one directory, or the same weights in several forms (files that a tool "
            "consolidated may hold zeros where the shards hold values)"
        )
        next_step = _how_to_choose(source, what, candidates, parts)
        apart = _apart(source, candidates, parts) if _same_names(what, candidates) else ()
        if apart:
            if len({_NUMBERS.sub("#", path) for path in apart}) == 1:  # steps, and not one model in several forms
                next_step = f"give the path of one of them, for example {shlex.quote(proposed(source, apart, sources))}"
                why = _EACH_FILE
            raise SeveralCheckpointsError(
                what_is_wrong,
                details=labels,
                most_shown=MAX_CANDIDATES,
                why=why,
                next_step=next_step,
                file=source,
                checkpoints=apart,
            )
        raise NeedsInformationError(
            what_is_wrong, details=labels, most_shown=MAX_CANDIDATES, why=why, next_step=next_step, file=source
        )


def _refuse_slices_without_rank_0(source: str, candidates: Sequence[ReadPart]) -> None:
    """Raises SourceIncompleteError if ``candidates`` are numbered 1, 2, 3 and hold optimizers of vectors only."""
    numbered = [re.fullmatch(r"(.*\D)([1-9]\d*)", part.stem) for part in candidates]
    words = [match.groups() for match in numbered if match is not None]
    numbers = sorted(int(number) for _, number in words)
    if len({name for name, _ in words}) != 1 or numbers != list(range(1, len(candidates) + 1)):
        return
    optims = [part.sections.optim for part in candidates]
    states = [states for optim in optims if optim is not None for states in optim.state.values()]
    leaves = [leaf for entry in states for leaf in entry.values()]
    if None in optims or {leaf.ndim for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim} != {1}:
        return
    absent = re.sub(rf"{words[0][1]}(\.[^./]*)$", r"0\1", candidates[0].label)
    raise SourceIncompleteError(
        f"{source}: these look like slices of {len(candidates)} ranks, but those of rank 0 are missing",
        expected=posixpath.basename(absent),
        found=some_of([part.origin.name for part in candidates], 4),
        file=absent,
        rank=0,
        why="all optimizer states in these files are one-dimensional, as FSDP1 cuts them, and the files are numbered "
        "from 1",
        next_step="copy the files of all ranks into one directory; or, if each is a checkpoint of its own, give one as "
        "SRC",
    )


def _how_to_choose(source: str, what: str, candidates: Sequence[ReadPart], parts: Sequence[ReadPart]) -> str:
    """The next step for the user: the path of one candidate if they are in different directories, else the options
    that leave only one. Files are left out only if they hold the same names: others may be the rest of one model.
    """
    named = _path_for_user(candidates, parts)
    if not _same_names(what, candidates):
        resumed = _of_framework(candidates, parts)
        if resumed is not None and not _has_one(resumed.origin.directory, candidates):
            return _leave_out_others(source, resumed, candidates)
        for each in candidates:
            others = [other for other in candidates if other is not each]
            path = _path_for_user([each, *others], parts)
            if _has_one(path, candidates):  # a path with several of them would be refused again
                named = path
                break
    directories = [candidate.origin.directory for candidate in candidates]
    name_one = f"give the path of one of them, for example {shlex.quote(named)}"
    if posixpath.commonpath([directory or "." for directory in directories]) not in directories:
        return name_one
    if not _same_names(what, candidates):
        return f"they hold different parameters: if each is a checkpoint of its own, {name_one}"
    globs = {candidate.label: glob_of(candidate.origin, source) for candidate in candidates}

    def preference(candidate: ReadPart) -> tuple[bool, bool, bool]:
        """The smallest is read: the source itself, shards, what a training job writes."""
        tree = candidate.tree
        return bool(globs[candidate.label]), tree.layout is Layout.FULL, tree.container == Container.SAFETENSORS

    chosen = min(candidates, key=preference).label
    ignored = " ".join(f"{flags.ignore_file(glob)}" for label, glob in globs.items() if label != chosen)
    shown = "that one" if named == chosen else shlex.quote(named)
    other = f"; or give {shown} as SRC" if named.rstrip("/") != source.rstrip("/") else ""
    return f"to read {chosen}, add {ignored}{other}"


def _has_one(path: str, candidates: Sequence[ReadPart]) -> bool:
    """Whether only one of ``candidates`` is at ``path`` or below."""
    return sum(is_in(each.label, path) for each in candidates) == 1


def _of_framework(candidates: Sequence[ReadPart], parts: Sequence[ReadPart]) -> ReadPart | None:
    """The only one of ``candidates`` that is state of the framework whose files are beside it; None if nothing says."""
    found = []
    for each in candidates:
        beside = [other.origin.name for other in parts if other.origin.directory == each.origin.directory]
        flavor = recognise(beside)
        if flavor is not None and re.search(flavor.state, each.origin.name):
            found.append(each)
    return found[0] if len(found) == 1 else None


def _leave_out_others(source: str, chosen: ReadPart, candidates: Sequence[ReadPart]) -> str:
    """The next step if a framework resumes from ``chosen``, and no path has it alone."""
    others = [each for each in candidates if each is not chosen]
    ignored = " ".join(f"{flags.ignore_file(glob_of(each.origin, source))}" for each in others)
    names = some_of([each.origin.name for each in others], 4)
    return f"if {names} {is_or_are(len(others))} no part of {chosen.label}, add {ignored}"


def _apart(source: str, candidates: Sequence[ReadPart], parts: Sequence[ReadPart]) -> tuple[str, ...]:
    """What to give as SRC for each of ``candidates``; empty if that is not a path of its own."""
    paths: list[str] = []
    for each in candidates:
        others = [other for other in candidates if other is not each]
        paths.append(_path_for_user([each, *others], parts))
    alone = len(set(paths)) == len(paths) and all(path.rstrip("/") != source.rstrip("/") for path in paths)
    return tuple(sorted(paths, key=natural)) if alone else ()


def _same_names(what: str, candidates: Sequence[ReadPart]) -> bool:
    """Whether all ``candidates`` hold the same parameters, or those of the first among more (tied weights once)."""
    names = [_names(what, candidate) for candidate in candidates]
    smallest = min(names, key=len)
    return all(smallest <= each for each in names)


def _names(what: str, candidate: ReadPart) -> set[str]:
    sections = candidate.sections
    if what == "model":
        return {clean(name) for name in sections.model.params} if sections.model is not None else set()
    return {clean(str(key)) for key in sections.optim.all_keys()} if sections.optim is not None else set()


def _place(part: Part) -> str:
    """The path of the part; of a set of files their directory and glob."""
    return f"{part.directory}/{part.glob}" if part.glob else part.label


def glob_of(part: Part, source: str) -> str:
    """The glob that leaves out ``part``: "" if that is the whole source."""
    path = relative_path(_place(part), source)
    shards, suffix = path.removesuffix(".index.json"), ""
    if shards != path:
        stem, _, suffix = shards.rpartition(".")
        return f"{stem}*.{suffix}*"
    return path


def _path_for_user(candidates: Sequence[ReadPart], parts: Sequence[ReadPart]) -> str:
    """What to give as SRC for the first of ``candidates``: the directory of a set of files; its directory if that has
    no other candidate and holds more than this part; otherwise the path itself.
    """
    part = candidates[0].origin
    alone = part.directory and all(other.origin.directory != part.directory for other in candidates[1:])
    if part.glob or (alone and sum(other.origin.directory == part.directory for other in parts) > 1):
        return part.directory
    return part.label


def several_checkpoints(
    path: str, candidates: Sequence[str], sources: Sources, why: str | None = None, empty: Sequence[str] = ()
) -> FsdpckptError:
    """The error for a directory with several ``candidates``: it lists the first in natural order, and names the newest.

    Parts of one model in numbered directories are no candidates. ``empty``: directories beside them that a save made
    and did not fill.
    """
    try:
        refuse_counted_parts(path, candidates)
    except SourceError as error:
        return error
    ordered = sorted(candidates, key=natural)
    lost = [pointer_text(pointer) for pointer in pointers(path, ordered, sources) if pointer.target is None]
    return SeveralCheckpointsError(
        f"{path} contains {plural(len(ordered), 'checkpoint')}",
        details=ordered,
        most_shown=MAX_CANDIDATES,
        why="; ".join((why or _EACH, *lost)),
        next_step=f"give the path of one of them, for example {shlex.quote(proposed(path, ordered, sources))} (inspect "
        "shows which are complete)",
        file=path,
        checkpoints=sorted((*candidates, *empty), key=natural),
    )


def newest(path: str, candidates: Sequence[str]) -> str:
    """The newest of ``candidates`` below ``path``: the highest number. Of several directories of one step, the first.

    It may be one whose save did not finish: ``proposed`` follows what the trainer says.
    """
    numbered = {each: list(map(int, _NUMBERS.findall(relative_path(each, path)))) for each in candidates}
    highest = max(numbered.values(), default=[])
    return next((each for each, numbers in numbered.items() if numbers == highest), candidates[0])


def proposed(path: str, candidates: Sequence[str], sources: Sources) -> str:
    """Which of ``candidates`` to read if one is asked for: what a ``latest`` file there names, else the newest."""
    for entry in sources.list_directory(path):
        named = _content_of_pointer(entry, sources)
        matching = [each for each in candidates if named and _names_step(relative_path(each, path), named)]
        if matching:
            return matching[0]
    return newest(path, candidates)


@dataclass(frozen=True, slots=True)
class Pointer:
    """A ``latest`` file, or a link. ``named``: what it says. ``target``: the path of the candidate, from the directory
    that holds both; None if it leads nowhere.
    """

    name: str
    named: str
    target: str | None


def pointers(path: str, candidates: Sequence[str], sources: Sources) -> list[Pointer]:
    """The ``latest`` files and the links to checkpoints in ``path``."""
    found = [_pointer(entry, path, candidates, sources) for entry in sources.list_directory(path)]
    return [pointer for pointer in found if pointer is not None]


def _pointer(entry: Entry, path: str, candidates: Sequence[str], sources: Sources) -> Pointer | None:
    """``entry`` as a pointer to one of ``candidates``, or to what is not there; None if it is something else."""
    named = _content_of_pointer(entry, sources)
    for each in candidates:
        relative = relative_path(each, path)
        # Of several in one directory of a step, that directory is what the file names.
        if named and _names_step(relative, named):
            return Pointer(entry.name, named, relative if relative.split("/")[-1] == named else relative.split("/")[0])
        if entry.link and each != entry.path and os.path.realpath(each) == entry.link:
            return Pointer(entry.name, posixpath.basename(entry.link), relative)
    if entry.link and not os.path.exists(entry.path):
        named = posixpath.basename(entry.link)
        forms = {_NUMBERS.sub("#", relative_path(each, path).split("/")[0]) for each in candidates}
        is_pointer = _POINTER.match(entry.name) is not None or _NUMBERS.sub("#", named) in forms
        return Pointer(entry.name, named, None) if is_pointer else None
    # Other files may be called latest, too: what names a step is one word with a number.
    if named is None:
        return None
    names_missing_step = _STEP.fullmatch(named) is not None and not _is_there(path, named, sources)
    return Pointer(entry.name, named, None) if not named or names_missing_step else None


def pointer_text(pointer: Pointer) -> str:
    """``latest names step-9, which is not there``."""
    if not pointer.named:
        return f"{pointer.name} is empty and names no checkpoint"
    return f"{pointer.name} names {pointer.target or f'{pointer.named}, which is not there'}"


def _is_there(path: str, named: str, sources: Sources) -> bool:
    """Whether ``path`` has something that ``named`` names, although it may be no checkpoint."""
    return any(_names_step(entry.name, named) for entry in sources.list_directory(path))


def _content_of_pointer(entry: Entry, sources: Sources) -> str | None:
    """The last component of what a small file such as ``latest`` names, "" for an empty one; None for any other."""
    if not is_pointer_file(entry):
        return None
    text = sources.open(entry.path).read(0, entry.nbytes).decode("utf-8", "replace").strip()
    return posixpath.basename(text.rstrip("/"))


def is_pointer_file(entry: Entry) -> bool:
    """Whether ``entry`` is a small file that is called as those that name the last step."""
    named_so = _POINTER.match(entry.name) is not None
    return named_so and not entry.directory and not entry.link and entry.nbytes <= _MAX_POINTER_BYTES


def _names_step(path: str, named: str) -> bool:
    """Whether a component of ``path`` is ``named``, or ends with that number (``global_step_14``, ``iter_0000014``)."""
    if not named.isdecimal():
        return named in path.split("/")
    numbers = [re.search(r"(?:^|[_-])0*(\d+)$", word) for word in path.split("/")]
    return any(match is not None and match[1] == str(int(named)) for match in numbers)
