"""Gives names to the models and optimizers of a checkpoint that has several, each in a part of its own.

accelerate numbers them (``pytorch_model_fsdp_0``, ``pytorch_model_fsdp_1``); trainers of models that consist of several
modules have a directory for each (``model/vit``, ``model/llm``).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fsdpckpt.ir.checkpoint import NamedSection, Note, Section
from fsdpckpt.ir.names import clean
from fsdpckpt.readers.counters import counted_parts
from fsdpckpt.readers.parts import ReadPart
from fsdpckpt.text import plural

_NUMBERED = re.compile(r"(pytorch_model_fsdp|optimizer)(?:_(\d+))?")  # accelerate's; of the first without its number
_DIRECTORIES = frozenset({"model", "models", "model_state", "optim", "optimizer", "optimizers", "optim_state"})
"""What trainers call a directory that has one for each module of the model."""


def with_names(parts: Sequence[ReadPart]) -> list[ReadPart]:
    """``parts``, with each of several models, and of several optimizers, as a named section of its part.

    Parts that are not certainly several, but perhaps one in several forms or pieces, are unchanged.
    """
    named = list(parts)
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
        named = [_as_named(part, section, of_part[id(part)]) if id(part) in of_part else part for part in named]
        first = next(number for number, part in enumerate(parts) if id(part) in of_part or part in candidates)
        named[first].sections.notes.insert(0, note)
    return named


_WORDS: Mapping[Section, str] = {Section.MODEL: "model", Section.OPTIM: "optimizer"}


def _content(part: ReadPart, section: Section) -> object:
    return part.sections.model if section is Section.MODEL else part.sections.optim


def _keys(candidates: Sequence[ReadPart], parts: Sequence[ReadPart], section: Section) -> list[str] | None:
    """The key of each; None if they are not certainly several sections."""
    numbered = [_NUMBERED.fullmatch(part.stem) for part in candidates]
    found = [f"{match[1]}_{match[2] or 0}" for match in numbered if match is not None]
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
    sections = part.sections
    content = sections.model if section is Section.MODEL else sections.optim
    if content is None:
        return part
    path = sections.model_path if section is Section.MODEL else sections.optim_path
    named = [*sections.named, NamedSection(section, key, (key,), content)]
    # Where in its file the section was says nothing of one that its file names. The list is a copy: it may grow.
    rest = replace(sections, named=named, where=[], notes=list(sections.notes))
    if section is Section.MODEL:
        changed = replace(rest, model=None, model_path=path)
    else:
        changed = replace(rest, optim=None, optim_path=path)
    return replace(part, sections=changed)
