"""One part of a checkpoint after reading: what its reader found, split into sections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Layout, ModelState, Section
from fsdpckpt.ir.files import paths_in
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.producers import EXTRA_STEM
from fsdpckpt.readers.flat_slices import why_sliced
from fsdpckpt.readers.protocol import FileTable, Part, PartContents
from fsdpckpt.readers.sections import Sections, split

_MOST_MODULES = 1000  # in one another: ``state_dict()`` takes a call for each, of which Python allows so many
# A part of this name is a dict of extras itself; the extras of any other part are under that part's name.
EXTRA_STEMS = frozenset({EXTRA_STEM, "extra", "meta"})


@dataclass(slots=True)
class ReadPart:
    """One part after reading: its tree and its sections. ``origin``: the part itself; ``file_numbers``: the first of
    its files in the table, and the end.
    """

    origin: Part
    tree: PartContents
    sections: Sections
    file_numbers: tuple[int, int] = (0, 0)

    def files_in(self, table: FileTable) -> frozenset[str]:
        """The paths of its files in ``table``."""
        return frozenset(paths_in(table.files()[slice(*self.file_numbers)]))

    @property
    def label(self) -> str:
        return self.origin.label

    @property
    def stem(self) -> str:
        return self.origin.stem

    @property
    def section_names(self) -> set[str]:
        """Which of the main model and optimizer it holds."""
        sections = (("model", self.sections.model), ("optimizer", self.sections.optim))
        return {name for name, section in sections if section is not None}

    @property
    def main_sections(self) -> list[Section]:
        sections = ((Section.MODEL, self.sections.model), (Section.OPTIM, self.sections.optim))
        return [section for section, content in sections if content is not None]

    @property
    def auxiliary(self) -> bool:
        """Whether it holds neither a model nor an optimizer, or only such as belong to the main ones elsewhere."""
        return not self.section_names and (not self.sections.named or self.stem in EXTRA_STEMS)

    def whole(self) -> bool:
        """Whether every rank's file holds all of it, judging by this part alone."""
        optim = self.sections.optim
        if self.tree.layout is not Layout.FULL:
            return False
        return optim is None or why_sliced(optim.state, self.sections.model, self.tree) is None


def read_part(part: Part, tree: PartContents) -> ReadPart:
    """Split ``tree`` into its sections. A part whose name says that it holds ``extras`` has only these; in the files
    of this name that we write, further models and optimizers are among them.
    """
    if part.extras:
        return ReadPart(part, tree, Sections(None, None, dict(cast("dict[Key, Value]", tree.root))))
    root = tree.root if isinstance(tree.root, dict) else {}
    for each in (root, *root.values()):  # before anything looks at the names
        _require_nestable(part.label, each if isinstance(each, dict) else ())
    called_model = "model" in part.stem.lower() and "optim" not in part.stem.lower()
    called_extra = part.stem == EXTRA_STEM
    sections = split(tree.root, called_model=called_model, called_extra=called_extra)
    if sections.optim is not None and tree.groups_rebuilt:
        sections.optim = replace(sections.optim, rebuilt=True)
    for section in (sections.model, sections.optim, *(named.content for named in sections.named)):
        if section is not None:
            _require_nestable(part.label, section.params if isinstance(section, ModelState) else section.all_keys())
    sections.take_orders(tree.orders)
    return ReadPart(part, tree, sections)


def _require_nestable(label: str, names: Iterable[object]) -> None:
    """Raises SourceUnsupportedError for a name of more modules than can nest. What is known of the modules that a name
    is in takes memory for each of them, and so the square of the length of a name.
    """
    for name in names:
        if isinstance(name, str) and name.count(".") > _MOST_MODULES:
            count = name.count(".") + 1
            raise SourceUnsupportedError(
                f"{label} has a name of {count:,} components: {name[:40]}...",
                file=label,
                expected=f"at most {_MOST_MODULES:,}, which is as deep as Python lets modules nest",
                found=f"{count:,}",
                why="no model has such names; the file may have been made to exhaust memory",
                next_step="save it under a shorter name",
            )
