"""One part of a checkpoint after reading: what its reader found, split into sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from fsdpckpt.ir.checkpoint import Layout
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.producers import EXTRA_STEM
from fsdpckpt.readers.flat_slices import why_sliced
from fsdpckpt.readers.protocol import Part, Tree
from fsdpckpt.readers.sections import Sections, split

# A part of this name is a dict of extras itself; the extras of any other part are under that part's name.
EXTRA_STEMS = frozenset({EXTRA_STEM, "extra", "meta"})


@dataclass(slots=True)
class ReadPart:
    """One part after reading: its tree and its sections. ``origin``: the part itself; ``file_numbers``: the first of
    its files in the table, and the end.
    """

    origin: Part
    tree: Tree
    sections: Sections
    file_numbers: tuple[int, int] = (0, 0)

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
    def auxiliary(self) -> bool:
        """Whether it holds neither a model nor an optimizer, or only such as belong to the main ones elsewhere."""
        return not self.section_names and (not self.sections.named or self.stem in EXTRA_STEMS)

    def whole(self) -> bool:
        """Whether every rank's file holds all of it, judging by this part alone."""
        optim = self.sections.optim
        if self.tree.layout is not Layout.FULL:
            return False
        return optim is None or why_sliced(optim.state, self.sections.model, self.tree) is None


def read_part(part: Part, tree: Tree) -> ReadPart:
    """Split ``tree`` into its sections. A part whose name says that it holds ``extras`` has only these; in the files
    of this name that we write, further models and optimizers are among them.
    """
    if part.extras:
        return ReadPart(part, tree, Sections(None, None, dict(cast("dict[Key, Value]", tree.root))))
    called_model = "model" in part.stem.lower() and "optim" not in part.stem.lower()
    called_extra = part.stem == EXTRA_STEM
    return ReadPart(part, tree, split(tree.root, called_model=called_model, called_extra=called_extra))
