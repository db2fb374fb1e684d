"""Gives names to the models and optimizers of a checkpoint that has several, each in a part of its own.

accelerate numbers them (``pytorch_model_fsdp_0``, ``pytorch_model_fsdp_1``; without FSDP ``model.safetensors``,
``model_1.safetensors``); trainers of models that consist of several modules have a directory for each (``model/vit``,
``model/llm``). A number says that there are others: one that is not there is a part that is missing.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice

from fsdpckpt.errors import SourceIncompleteError
from fsdpckpt.ir.checkpoint import ModelState, NamedSection, Note, Section
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.readers.counters import counted_parts
from fsdpckpt.readers.parts import ReadPart
from fsdpckpt.text import plural

_MOST_MISSING = 10_000  # parts that are named
# accelerate's names of parts; the first may have no number.
_NUMBERED = re.compile(r"(?P<stem>pytorch_model_fsdp|optimizer)(?:_(?P<number>\d+))?(?:\.bin)?")
_WITHOUT_FSDP = (  # of other programs, too: only beside what accelerate alone writes
    re.compile(r"(?P<stem>model)(?:_(?P<number>\d+))?\.safetensors"),
    re.compile(r"(?P<stem>pytorch_model)(?:_(?P<number>\d+))?\.bin"),
)
_BY_ACCELERATE = re.compile(r"random_states_\d+\.pkl|optimizer_\d+\.bin")
_COUNTED = re.compile(r"(?P<stem>model|optim|optimizer)_(?P<number>\d+)")  # anything: a step, a rank, one of several
_DIRECTORIES = frozenset({"model", "models", "model_state", "optim", "optimizer", "optimizers", "optim_state"})
"""What trainers call a directory that has one for each module of the model."""


def with_names(parts: Sequence[ReadPart], source: str) -> list[ReadPart]:
    """``parts``, with each of several models, and of several optimizers, as a named section of its part.

    Parts that are not certainly several, but perhaps one in several forms or pieces, are unchanged. Raises
    SourceIncompleteError if the number of one says that others are missing. A part that is ``source`` is all that was
    asked for.
    """
    named = list(parts)
    _require_all_numbers([part for part in parts if part.label != source], source)
    taken: set[str] = set()
    for section in (Section.MODEL, Section.OPTIM):
        candidates = [part for part in named if _content(part, section) is not None]
        keys = _keys(candidates, named, section) if len(candidates) > 1 else None
        if keys is None:
            continue
        keys = [f"{key}_{section}" if key in taken else key for key in keys]
        taken.update(keys)
        of_part = {id(part): key for part, key in zip(candidates, keys, strict=True)}
        note = Note("several-models", f"{plural(len(keys), _WORDS[section])} found ({', '.join(keys)})")
        if section is Section.OPTIM:
            note = replace(note, kind="several-optimizers")
        for number, part in enumerate(named):
            if id(part) in of_part:
                named[number] = _as_named(part, section, of_part[id(part)])
        first = next(number for number, part in enumerate(parts) if id(part) in of_part or part in candidates)
        named[first].sections.notes.insert(0, note)
    return named


_WORDS: Mapping[Section, str] = {Section.MODEL: "model", Section.OPTIM: "optimizer"}


def _content(part: ReadPart, section: Section) -> ModelState | Optimizer | None:
    return part.sections.model if section is Section.MODEL else part.sections.optim


def _keys(candidates: Sequence[ReadPart], parts: Sequence[ReadPart], section: Section) -> list[str] | None:
    """The key of each; None if they are not certainly several sections."""
    directories = _written_by_accelerate(parts)
    numbered = [_numbered(part, directories) for part in candidates]
    found = [f"{match['stem']}_{match['number'] or 0}" for match in numbered if match is not None]
    if len(set(found)) == len(candidates):
        return found
    modules = list(map(_module, candidates))
    names = [posixpath.basename(module) for module in modules if module is not None]
    above = {posixpath.dirname(module) for module in modules if module is not None}
    if len(set(names)) != len(candidates) or len(above) != 1 or counted_parts(names) is not None:
        return None
    if any("." in name or re.search(r"\d$", name) for name in names):
        return None
    # Two modules may have the names of one class; with an optimizer each they are no two forms of one model.
    other = Section.OPTIM if section is Section.MODEL else Section.MODEL
    with_other = {_module(part) for part in parts if section_of_part(part, other)}
    return names if not _share_names(candidates, section) or with_other >= set(modules) else None


def _written_by_accelerate(parts: Sequence[ReadPart]) -> frozenset[str]:
    """The directories of ``parts`` with what accelerate alone writes."""
    return frozenset(part.origin.directory for part in parts if _BY_ACCELERATE.fullmatch(part.origin.name))


def _numbered(part: ReadPart, by_accelerate: Set[str]) -> re.Match[str] | None:
    """The name of ``part`` as accelerate numbers parts; None if it is no such name. ``by_accelerate``: the directories
    with what it alone writes.
    """
    name = part.origin.name
    match = _NUMBERED.fullmatch(part.stem) or _NUMBERED.fullmatch(name)
    if match is not None or part.origin.directory not in by_accelerate:
        return match
    matches = (pattern.fullmatch(name) for pattern in _WITHOUT_FSDP)
    return next((match for match in matches if match is not None), None)


def _require_all_numbers(parts: Sequence[ReadPart], source: str) -> None:
    """Raises SourceIncompleteError if ``parts`` that accelerate numbers are not all there. If the numbers of models and
    of optimizers are the same ones, they are those of something else. What other programs number is only noted.
    """
    directories = _written_by_accelerate(parts)
    numbers: dict[Section, dict[int, ReadPart]] = {Section.MODEL: {}, Section.OPTIM: {}}
    for section, of_section in numbers.items():
        for part in parts:
            match = _numbered(part, directories) or _COUNTED.fullmatch(part.stem)
            if _content(part, section) is not None and match is not None:
                of_section[int(match["number"] or 0)] = part
    if numbers[Section.MODEL].keys() == numbers[Section.OPTIM].keys():
        return
    for section, of_section in numbers.items():
        if len(of_section) > max(of_section, default=-1):
            continue
        last = of_section[max(of_section)]
        if _numbered(last, directories) is None or last.origin.name.endswith((".pt", ".pth")):
            message = (
                f"{last.label} has a number, and no other {_WORDS[section]} is here: if it is one of several, the "
                "others are missing"
            )
            last.sections.notes.append(Note("part-of", message, for_verify=True))
            continue
        # One at a time: a name may have a number that counts more than there is memory for.
        missing = (number for number in range(max(of_section)) if number not in of_section)
        absent = list(islice(missing, _MOST_MISSING))
        is_file = "." in last.origin.name  # the first one of several files has no number, and of directories it has 0
        numbered = [f"_{number}" if number or not is_file else "" for number in absent]
        names = [re.sub(r"_\d+", number, last.origin.name, count=1) for number in numbered]
        raise SourceIncompleteError(
            f"{source} has {_WORDS[section]} number {max(of_section)}, but not the ones before it",
            details=[f"{name} is missing" for name in names],
            most_shown=8,
            file=last.label,
            why="accelerate numbers the models and the optimizers of a job from 0; the copy or the save did not finish",
            next_step=f"copy all of them; or give {last.label} as SRC, if that is all you need",
        )


def section_of_part(part: ReadPart, section: Section) -> bool:
    """Whether ``part`` holds ``section``, the main one or one that has a name by now."""
    return _content(part, section) is not None or any(named.section is section for named in part.sections.named)


def _module(part: ReadPart) -> str | None:
    """The directory of the module whose part it is: ``model/vit`` for ``model/vit`` and ``model/vit/ckpt``; None if no
    directory above has one for each module.
    """
    words = (part.origin.directory if part.origin.glob else part.label.rstrip("/")).split("/")
    for at in range(len(words) - 1, max(0, len(words) - 3), -1):
        if words[at - 1] in _DIRECTORIES:
            return "/".join(words[: at + 1])
    return None


def _share_names(candidates: Sequence[ReadPart], section: Section) -> bool:
    """Whether two of them have a parameter in common: they may be one model in two forms."""
    seen: set[str] = set()
    for part in candidates:
        sections = part.sections
        if section is Section.MODEL:
            names = {clean(name) for name in sections.model.params} if sections.model is not None else set()
        else:
            names = {str(key) for key in sections.optim.all_keys()} if sections.optim is not None else set()
            if sections.optim is not None and sections.optim.key_type == "id":
                names = set()
        if names & seen:
            return True
        seen |= names
    return False


def _as_named(part: ReadPart, section: Section, key: str) -> ReadPart:
    """``part`` with its ``section`` as the named one of ``key``."""
    sections, content = part.sections, _content(part, section)
    if content is None:
        return part
    named = [*sections.named, NamedSection(section, key, (key,), content)]
    # Where in its file the section was says nothing of one that its file names. The list is a copy: it may grow.
    rest = replace(sections, named=named, where=[], notes=list(sections.notes))
    changed = replace(rest, model=None) if section is Section.MODEL else replace(rest, optim=None)
    return replace(part, sections=changed)
