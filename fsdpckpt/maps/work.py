"""Runs the rules of a map on tensors: of a model, and of the states of its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fsdpckpt import flags
from fsdpckpt.errors import FsdpckptError, InternalError, NeedsInformationError, SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.files import Inline, SourceFile
from fsdpckpt.ir.state_shapes import mirrors
from fsdpckpt.ir.tensors import Boxes, Chunks, Tensor
from fsdpckpt.maps.boxes import Rearranger
from fsdpckpt.maps.match import Use
from fsdpckpt.maps.steps import Family, Member, StepError, Values

_ANY_DTYPE = DTYPES["uint8"]  # of shapes without data


@dataclass(frozen=True, slots=True)
class Reading:
    """What a map asks of data. ``number``: the bytes of a tensor of one element; ``equal``: whether two tensors
    hold the same bytes.
    """

    number: Callable[[Tensor], bytes]
    equal: Callable[[Tensor, Tensor], bool]


class Work:
    """Runs rules on tensors. ``notes``: what has to be said of it."""

    def __init__(
        self, checkpoint: Checkpoint, values: Values, reading: Reading, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.checkpoint = checkpoint
        self.reading = reading
        self.notes: list[Note] = []
        self._values = values
        self._rearranger = Rearranger()
        self._shapes = shapes
        self._targets: dict[Use, list[str]] = {}
        self._proved: set[str] | None = None
        self._several: set[str] | None = None
        self._numbers = bytearray()

    def files(self) -> tuple[SourceFile, ...]:
        """The files of the checkpoint that is made."""
        own = (Inline(bytes(self._numbers)),) if self._numbers else ()
        return (*self.checkpoint.files, *own)

    def copy_of(self, number: Tensor) -> Tensor:
        """A tensor of one element that has the same value and memory of its own.

        ``torch.save`` keeps what shares memory as one, and an optimizer would count the steps of all in one number.
        """
        place = Chunks.whole(file=len(self.checkpoint.files), offset=len(self._numbers), shape=number.shape)
        self._numbers += self.reading.number(number)
        return Tensor(number.dtype, number.shape, place, number.sharded)

    def targets(self, use: Use) -> list[str]:
        """The names that ``use`` makes, in order."""
        if use not in self._targets:
            self._targets[use] = [use.target(member) for member in self._members(use)]
        return self._targets[use]

    def new_name(self, use: Use, name: str) -> str:
        """What a ``use`` of a rule that renames alone makes of ``name``, one of its sources."""
        return self.targets(use)[list(use.sources.values()).index(name)]

    def _members(self, use: Use) -> list[Member]:
        if use.rule.copies:
            several = len(use.rule.targets) > 1
            return [(position if several else None, None) for position in range(len(use.rule.targets))]
        if not use.rule.steps:
            return list(use.sources)
        outline = {member: _outline(self.shape(name)) for member, name in use.sources.items()}
        return sorted(self.run(use, outline, ""), key=lambda member: (member[1] or 0, member[0] or 0))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter: the model's, or that of its states."""
        shape = self._shapes.get(name)
        if shape is not None:
            return shape
        optim = self.checkpoint.optim
        states = optim.state.get(name, {}) if optim is not None else {}
        mirroring = [leaf for state, leaf in states.items() if isinstance(leaf, Tensor) and mirrors(state)]
        shapes = {leaf.shape for leaf in mirroring if leaf.ndim}
        if len(shapes) != 1:
            raise NeedsInformationError(
                f"the shape of {name} is unknown: the model section is missing, and its states "
                f"{'have several' if shapes else 'show none'}",
                key=name,
                file=self.checkpoint.source,
                next_step="convert a checkpoint that has its model",
            )
        return shapes.pop()

    def run(self, use: Use, family: Family, state: str) -> Family:
        """The tensors that the steps of the rule make of ``family``. ``state``: of the optimizer, "" for parameters."""
        before = sum(tensor.numel for tensor in family.values())
        dtypes = {tensor.dtype.name: member for member, tensor in family.items()}
        if len(dtypes) > 1:
            listed = [f"{_key(use.sources[member], state)} is {dtype}" for dtype, member in dtypes.items()]
            raise self._refused(f"{use.rule} joins tensors of several dtypes", listed, use.sources[next(iter(family))])
        for step in use.rule.steps:
            try:
                family = step.run(family, self._rearranger, self._values)
            except StepError as error:
                name = use.sources.get(error.member, next(iter(use.sources.values())))
                raise self._refused(f"{_key(name, state)} does not fit {use.rule}", [error.what], name) from error
            except FsdpckptError:  # of a number that nothing gives
                raise
            except ValueError as error:
                raise self._refused(
                    f"{use.rule} cannot be applied", [str(error)], next(iter(use.sources.values()))
                ) from error
        if sum(tensor.numel for tensor in family.values()) != before:
            raise InternalError(f"{use.rule} makes other elements of {before}")
        return {member: self._rearranger.new(tensor) for member, tensor in family.items()}

    def _refused(self, what: str, details: Sequence[str], key: str) -> SourceUnsupportedError:
        return SourceUnsupportedError(
            what,
            details=details,
            file=self.checkpoint.source,
            key=key,
            why="the map, or a value that it was given, is of another model",
            next_step=f"see the shapes with {flags.command('inspect', self.checkpoint.source)}, and correct the map",
        )

    def refuse_state(self, name: str, state: str, why: str, use: Use) -> SourceUnsupportedError:
        return SourceUnsupportedError(
            f"{_key(name, state)} cannot be moved with its parameter, which {use.rule} rearranges",
            file=self.checkpoint.source,
            key=_key(name, state),
            why=why,
            next_step=f"{flags.only('model')} converts the model alone",
        )

    def is_elementwise(self, state: str) -> bool:
        """Whether every state of this name has one element for each of its parameter's, so far as shapes can show it.

        One whose shape only happens to be that of a square matrix, or of a vector, shows nothing.
        """
        if mirrors(state):
            return True
        if self._proved is None:
            self._proved = self._proved_states()
        return state in self._proved

    def is_number(self, state: str) -> bool:
        """Whether no parameter has several elements in the state of this name: a factor of a vector may have one."""
        if self._several is None:
            optim = self.checkpoint.optim
            self._several = {
                name
                for states in (optim.state.values() if optim is not None else ())
                for name, leaf in states.items()
                if isinstance(leaf, Tensor) and leaf.numel != 1
            }
        return state not in self._several

    def _proved_states(self) -> set[str]:
        proved: set[str] = set()
        disproved: set[str] = set()
        optim = self.checkpoint.optim
        for name, states in optim.state.items() if optim is not None else ():
            shape = self._shapes.get(str(name))
            for state, leaf in states.items():
                if not isinstance(leaf, Tensor) or not leaf.ndim or shape is None:
                    continue
                if leaf.shape != shape:
                    disproved.add(state)
                elif len(set(shape)) > 1:
                    proved.add(state)
        return proved - disproved


def _key(name: str, state: str) -> str:
    return f"{name}.{state}" if state else name


def _outline(shape: tuple[int, ...]) -> Tensor:
    """A tensor of ``shape`` without chunks: it shows what steps make of shapes."""
    none = np.zeros(0, np.int64)
    boxes = np.zeros((0, len(shape)), np.int64)
    return Tensor(_ANY_DTYPE, shape, Chunks(none, none, none, Boxes(boxes, boxes, boxes)))
