"""The table of one model's parameters and buffers: each is a row, and its name stands in one cell.

Members of an optimizer are tied to rows by number, never by name (``ir.table``). A row that gets a new name has it
wherever the name is written: in the model, in the keys and the groups of the optimizer, in ``param_names``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from typing import Final

from fsdpckpt.ir.checkpoint import Checkpoint, ModelState
from fsdpckpt.ir.parameters import RowNumber
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Value


class RowKind(StrEnum):
    """What a row is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    UNDETERMINED = "undetermined"


class _Absent(Enum):
    ABSENT = auto()


ABSENT: Final = _Absent.ABSENT
"""The value of a row that the checkpoint has no entry of: only an optimizer names it."""


@dataclass(slots=True, eq=False)  # Final, not frozen: there are many
class Row:
    """One row. ``value``: its entry in the model section. ``kind``: what is known of it."""

    name: Final[str]
    value: Final[Tensor | Value | _Absent]
    kind: Final[RowKind]

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The global shape, None for a value that is no tensor."""
        return self.value.shape if isinstance(self.value, Tensor) else None


@dataclass(frozen=True, slots=True)
class Parameters:
    """The table. The rows of the model come first, in its order.

    ``in_model``: how many rows the model section has, None if there is no such section.

    ``metadata``: what ``nn.Module.state_dict`` attaches to the model.
    """

    rows: tuple[Row, ...]
    in_model: int | None
    metadata: Value = None

    @classmethod
    def of(cls, checkpoint: Checkpoint, trained: Iterable[str] = (), others: Iterable[str] = ()) -> Parameters:
        """The rows of the model, then those of the names that only the optimizer has.

        ``trained``: the names of its parameters. ``others``: those of entries that a user added to its states.
        """
        model = checkpoint.model
        in_model = model.params if model is not None else {}
        parameters, parameter = dict.fromkeys(trained), RowKind.PARAMETER
        rows = []
        for name in dict.fromkeys((*in_model, *parameters, *others)):
            value = in_model.get(name, ABSENT)
            kind = parameter if name in parameters else _kind(value)
            rows.append(Row(name, value, kind))
        if model is None:
            return cls(tuple(rows), None, None)
        return cls(tuple(rows), len(in_model), model.metadata)

    def by_name(self) -> dict[str, RowNumber]:
        return {parameter.name: row for row, parameter in enumerate(self.rows)}

    def renamed(self, names: Mapping[str, str]) -> Parameters:
        """The same rows under new names (old to new); those that ``names`` lacks keep theirs."""
        rows = []
        for row in self.rows:
            new = names.get(row.name, row.name)
            rows.append(row if new == row.name else Row(new, row.value, row.kind))
        return replace(self, rows=tuple(rows))

    def sharing(self) -> list[tuple[RowNumber, ...]]:
        """The rows that have the same bytes of the source, group by group: those of shared parameters."""
        rows: dict[tuple[object, ...], list[RowNumber]] = {}
        for number, row in enumerate(self.rows):
            if isinstance(row.value, Tensor) and (location := row.value.location()) is not None:
                rows.setdefault(location, []).append(number)
        return [tuple(shared) for shared in rows.values() if len(shared) > 1]

    def emptied(self, rows: Collection[RowNumber]) -> Parameters:
        """The table without the entries of ``rows``. The others keep their numbers."""
        changed = (replace(row, value=ABSENT) if number in rows else row for number, row in enumerate(self.rows))
        return replace(self, rows=tuple(changed))

    def model(self) -> ModelState | None:
        """The model section; None if the checkpoint has none."""
        if self.in_model is None:
            return None
        params: dict[str, Tensor | Value] = {}
        for row in self.rows[: self.in_model]:
            if row.value is not ABSENT:
                params[row.name] = row.value
        return ModelState(params, self.metadata)


def _kind(value: Tensor | Value | _Absent) -> RowKind:
    """The kind of a row that no optimizer lists."""
    if value is ABSENT:
        return RowKind.UNDETERMINED
    if not isinstance(value, Tensor):
        return RowKind.BUFFER  # ``_extra_state``
    if value.undetermined:
        return RowKind.UNDETERMINED
    if value.sharded:
        return RowKind.PARAMETER
    # FSDP leaves parameters whole, too: those that it ignores.
    return RowKind.UNDETERMINED if value.dtype.kind in ("float", "complex") else RowKind.BUFFER


def undetermined(checkpoint: Checkpoint) -> list[str]:
    """The model keys that were cut like parameters although nothing says that they are none of the buffers."""
    params: Mapping[str, Tensor | Value] = checkpoint.params
    return [name for name, leaf in params.items() if isinstance(leaf, Tensor) and leaf.undetermined]
