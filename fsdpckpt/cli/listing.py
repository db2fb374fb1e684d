"""Lists the tensors of ``inspect``: one row for each key or, on a terminal, one row for the keys of all layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdpckpt.cli.folded_stats import joined_stats
from fsdpckpt.cli.output import GAP, Cell, Name, cut_line, table_lines
from fsdpckpt.credentials import shown_name
from fsdpckpt.describe import Description
from fsdpckpt.ir.checkpoint import Checkpoint, NamedTensor, Section
from fsdpckpt.ir.files import Stored
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.tensors import Stats
from fsdpckpt.text import braces, count_text, fold, key_text, shape_text, size_text

FIELDS = ("section", "key", "dtype", "shape", "bytes", "placement")
STATS = ("min", "max", "mean", "std", "norm", "NaN", "Inf")
PIECES = ("rank", "box", "file", "offset")
NUMBERS = frozenset({"bytes", *STATS, "rank", "offset"})  # aligned right
READABLE = 44  # characters of a key that must be visible before a statistic is shown
IN_MODEL = "as in model"  # in place of the shape or the placement that a state shares with its parameter
SEVERAL = "several"


@dataclass(frozen=True, slots=True)
class ListedKey:
    """One key, or ``count`` keys that are folded into ``key``; ``nbytes``: of all of them.

    ``more``: the cells of statistics or of one chunk. ``again``: a further chunk of the key in the row above.
    ``first``: the place of the first of the keys in the checkpoint.
    """

    section: str
    key: str
    dtype: str
    shape: str
    nbytes: int
    placement: str
    count: int = 1
    more: tuple[Cell, ...] = ()
    again: bool = False
    first: int = 0

    def cells(self, fields: Iterable[str]) -> tuple[Cell, ...]:
        return (*("" if self.again else self._cell(field) for field in fields), *self.more)

    def _cell(self, field: str) -> Cell:
        if field == "key":
            return Name(key_text(self.key), f"  x{count_text(self.count)}" if self.count > 1 else "")
        return size_text(self.nbytes) if field == "bytes" else str(getattr(self, field))


def listing(
    description: Description, *, ranks: bool, unfold: bool, columns: int | None
) -> tuple[list[str], frozenset[int]]:
    """The lines of the table, and which of them are headings. ``columns``: of the terminal, None in a pipe."""
    measured = description.stats is not None
    more = (*(STATS if measured else ()), *(PIECES if ranks else ()))
    if ranks or (unfold and measured):
        rows = _rows(description, short=columns is not None)
    elif measured:
        rows = _folded_with_stats(description)
    else:
        rows = _rows(description, short=False) if unfold else folded_rows(description)
    if ranks:
        rows = list(_chunk_rows(description, rows))
    lines = _lines([(*FIELDS, *more), *(row.cells(FIELDS) for row in rows)], (*FIELDS, *more), None)
    if columns is None or not rows or max(map(len, lines)) <= columns:
        return lines, frozenset({0})
    if measured and not ranks:
        return _fewer_stats(rows, columns)
    return _under_keys(rows, columns) if more == PIECES else _by_section(rows, more, columns)


def _fewer_stats(rows: Sequence[ListedKey], columns: int) -> tuple[list[str], frozenset[int]]:
    """The table with as many statistics as leave room for recognisable keys, and a line that names the others."""
    shown = list(range(len(STATS)))
    key_width = min(max(len(row.key) for row in rows), READABLE)
    columns_of_stats = zip(STATS, *(row.more for row in rows), strict=True)
    widths = [max(map(len, map(str, cells))) + GAP for cells in columns_of_stats]
    for name in ("std", "norm", "mean"):
        if columns - sum(widths[at] for at in shown) < key_width:
            shown.remove(STATS.index(name))
    fewer: list[ListedKey] = []
    for row in rows:
        fewer.append(replace(row, more=tuple(row.more[at] for at in shown)))
    lines, headings = _by_section(fewer, [STATS[at] for at in shown], columns)
    if left_out := [name for at, name in enumerate(STATS) if at not in shown]:
        lines.append(cut_line(f"columns left out: {', '.join(left_out)} (--json has them)", columns))
    return lines, headings


def _under_keys(rows: Sequence[ListedKey], columns: int) -> tuple[list[str], frozenset[int]]:
    """Chunks below the keys of their tensors: beside them, both would be cut."""
    right = [at for at, heading in enumerate(PIECES) if heading in NUMBERS]
    heading, *chunks = table_lines([PIECES, *(row.more for row in rows)], right=right, columns=columns - GAP)
    lines = [" " * GAP + heading]
    for row, chunk in zip(rows, chunks, strict=True):
        if not row.again:
            facts = f"  {row.dtype} {row.shape} {row.placement}"
            key = Name(f"{row.section} {key_text(row.key)}").within(columns)  # whole, if only that fits
            lines.append(cut_line(key + facts, columns))
        lines.append(" " * GAP + chunk)
    return lines, frozenset({0})


def _lines(cells: Sequence[Sequence[Cell]], headings: Sequence[str], columns: int | None) -> list[str]:
    right = frozenset(at for at, heading in enumerate(headings) if heading in NUMBERS)
    return table_lines(cells, right=right, columns=columns)


def _by_section(rows: Sequence[ListedKey], more: Sequence[str], columns: int) -> tuple[list[str], frozenset[int]]:
    """A heading for each section with what its rows have in common, which then needs no columns."""
    sections: dict[str, list[ListedKey]] = {}
    for row in rows:
        sections.setdefault(row.section, []).append(row)
    common = {section: _common_cells(of_section) for section, of_section in sections.items()}
    of_all = set(FIELDS).intersection(*common.values())
    fields = [field for field in FIELDS[2:] if field not in of_all]
    if more:  # which needs the room
        fields = [field for field in fields if field == "shape" and more == PIECES]
    cells: list[Sequence[Cell]] = []
    headings = set()
    for section, of_section in sections.items():
        shared = ", ".join(text for field, text in common[section].items() if field not in fields)
        headings.add(len(cells))
        cells.append((Name(f"{section}: {shared}" if shared else str(section)), *fields, *more))
        cells += [row.cells(("key", *fields)) for row in of_section]
    return _lines(cells, ("key", *fields, *more), columns), frozenset(headings)


def _common_cells(rows: Sequence[ListedKey]) -> dict[str, str]:
    """The dtype and the placement that all rows have in common; a whole scalar matches any placement."""
    dtypes = {row.dtype for row in rows}
    placements = {row.placement for row in rows if (row.shape, row.placement) != ("[]", "whole")} or {"whole"}
    texts_by_field = {"dtype": dtypes, "placement": placements}
    return {field: next(iter(texts)) for field, texts in texts_by_field.items() if len(texts) == 1}


def _row(named: NamedTensor) -> ListedKey:
    tensor = named.tensor
    return ListedKey(
        named.label, named.key, tensor.dtype.name, shape_text(tensor.shape), tensor.nbytes, tensor.placement
    )


def _rows(description: Description, *, short: bool) -> list[ListedKey]:
    """One row for each key. ``short``: numbers with fewer digits."""
    shown = [_row(named) for named in description.tensors]
    if description.stats is None:
        return shown
    return [
        replace(row, more=_stats_cells(stats, 3 if short else 5))
        for row, stats in zip(shown, description.stats, strict=True)
    ]


def _folded_with_stats(description: Description) -> list[ListedKey]:
    """One row for all keys that differ only in numbers, with the statistics of all their elements."""
    tensors, stats = description.tensors, description.stats or ()
    each = [_row(named) for named in tensors]
    states = [named for named in tensors if named.state is not None]
    scalars = Counter((named.label, named.state) for named in states if not named.tensor.ndim)
    with_states = {(named.label, named.param) for named in states}
    params = Counter(label for label, _ in with_states)
    for at, named in enumerate(tensors):
        # A scalar that every parameter has, such as its step, is one row.
        if named.state is not None and scalars[named.label, named.state] == params[named.label] > 1:
            each[at] = replace(each[at], key=f"*.{named.state}")
    rows = []
    for folded in fold((row.key, (row.section, row.dtype, row.shape, row.placement)) for row in each):
        joined = joined_stats([(stats[at], tensors[at].tensor.numel) for at in folded.members])
        row = _join(folded.key, [each[at] for at in folded.members])
        rows.append(replace(row, more=_stats_cells(joined, 3)))
    return rows


def _stats_cells(stats: Stats | None, digits: int) -> tuple[Cell, ...]:
    if stats is None:
        return ("-",) * len(STATS)
    texts = ["-" if number is None else f"{number:.{digits}g}" for number in stats.numbers]
    return (*texts, str(stats.nan), str(stats.inf))


def _chunk_rows(description: Description, rows: Sequence[ListedKey]) -> Iterator[ListedKey]:
    """One row for each stored chunk."""
    from fsdpckpt.ir.coverage import box_text

    source = description.checkpoint.source.rstrip("/")
    files = description.checkpoint.files
    paths = [_relative_to_source(file.path, source) if isinstance(file, Stored) else "-" for file in files]
    for row, named in zip(rows, description.tensors, strict=True):
        chunks = named.tensor.chunks
        columns = (chunks.rank, chunks.start, chunks.size, chunks.file, chunks.offset)
        number = -1
        for number, (rank, start, size, file, offset) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            path = paths[file] if 0 <= file < len(paths) else "?"
            place = (str(rank), box_text(start, size), Name(path), str(offset))
            again = number > 0
            yield replace(row, more=(*(("",) * len(row.more) if again else row.more), *place), again=again)
        if number < 0:
            yield replace(row, more=(*row.more, "", "", "", ""))


def _relative_to_source(path: str, source: str) -> str:
    """The path of a file relative to the source, which the summary names already."""
    return path.removeprefix(source + "/") if path != source else shown_name(path)


def folded_rows(description: Description) -> list[ListedKey]:
    """One row for all keys that differ only in numbers and agree in dtype, shape and placement.

    An optimizer state that all parameters have is one row: ``*.exp_avg``. If ranks saved their own extras, the common
    extras are a copy of rank 0's and have no row.
    """
    tensors = description.tensors
    extras = {named.key for named in tensors if named.section is Section.EXTRA}
    by_section: dict[str, list[NamedTensor]] = {}
    for named in tensors:
        if named.section is not Section.EXTRA or f"rank0.{named.key}" not in extras:
            by_section.setdefault(named.label, []).append(named)
    rows: list[ListedKey] = []
    optimizers = _optimizers(description.checkpoint)
    models = [of_section for of_section in by_section.values() if of_section[0].section is Section.MODEL]
    for section, of_section in by_section.items():
        if section in optimizers:
            optim = optimizers[section]
            general, rest = _join_shared_states(optim, of_section, _trained_by(of_section, models))
            rows += [*general, *_join_states(rest)]
        else:
            rows += _fold([(named.key, _row(named)) for named in of_section])
    return rows


def _optimizers(checkpoint: Checkpoint) -> dict[str, Optimizer]:
    """The optimizer, and each of several, by the name of its section."""
    main = {str(Section.OPTIM): checkpoint.optim} if checkpoint.optim is not None else {}
    named: dict[str, Optimizer] = {}
    for each in checkpoint.named:
        if isinstance(each.content, Optimizer):
            named[each.label] = each.content
    return main | named


def _trained_by(states: Sequence[NamedTensor], models: Sequence[Sequence[NamedTensor]]) -> Sequence[NamedTensor]:
    """The first of ``models`` that has all parameters of the optimizer with ``states``; if there is one, that."""
    if len(models) == 1:
        return models[0]
    names = {named.param for named in states if named.state is not None}
    for model in models:
        if names <= {named.param for named in model}:
            return model
    return ()


def _fold(keyed: Sequence[tuple[str, ListedKey]]) -> list[ListedKey]:
    """``keyed``: the key to fold, and its row."""
    alike = [(key, (row.section, row.dtype, row.shape, row.placement)) for key, row in keyed]
    rows: list[ListedKey] = []
    for folded in fold(alike):
        rows.append(_join(folded.key, [keyed[at][1] for at in folded.members]))
    return rows


def _join(key: str, rows: Sequence[ListedKey]) -> ListedKey:
    """One row for several that agree in everything else."""
    nbytes, count = sum(row.nbytes for row in rows), sum(row.count for row in rows)
    return replace(rows[0], key=key, nbytes=nbytes, count=count)


def _join_states(tensors: Sequence[NamedTensor]) -> list[ListedKey]:
    """States of folded parameters; those that a parameter has alike share a row."""
    by_state: dict[str | None, list[tuple[str, ListedKey]]] = {}
    for first, named in enumerate(tensors):
        key = named.key.removesuffix(f".{named.state}") if named.state is not None else named.key
        by_state.setdefault(named.state, []).append((key, replace(_row(named), first=first)))
    several: dict[tuple[object, ...], list[tuple[str | None, ListedKey]]] = {}
    for state, keyed in by_state.items():
        for row in _fold(keyed):
            alike = (row.key, row.dtype, row.shape, row.placement, row.count)
            several.setdefault(alike, []).append((state, row))
    joined: list[ListedKey] = []
    for members in several.values():
        states, rows = zip(*members, strict=True)
        joined.append(_join(_with_states(rows[0].key, list(filter(None, states))), rows))
    return sorted(joined, key=lambda row: row.first)


def _with_states(key: str, states: Sequence[str]) -> str:
    return f"{key}.{braces(states)}" if states else key


def _join_shared_states(
    optim: Optimizer, tensors: Sequence[NamedTensor], model: Sequence[NamedTensor]
) -> tuple[list[ListedKey], list[NamedTensor]]:
    """A row for the states that every parameter of the optimizer has, and the tensors of all other states.

    Only if the model's rows show which parameters these are.
    """
    if not model:
        return [], list(tensors)
    parameters = {str(key) for key in (*optim.grouped_keys(), *optim.state)}
    of_model = {named.param: _row(named) for named in model}
    by_state: dict[str | None, list[NamedTensor]] = {}
    for named in tensors:
        by_state.setdefault(named.state, []).append(named)
    rest: list[NamedTensor] = []
    several: dict[tuple[str, ...], list[tuple[str, list[ListedKey]]]] = {}
    for state, of_state in by_state.items():
        rows = [_row(named) for named in of_state]
        in_model = [of_model.get(named.param) for named in of_state]
        fields = [_common_value(rows, field, in_model) for field in ("dtype", "shape", "placement")]
        if state is None or {named.param for named in of_state} != parameters or None in fields:
            rest += of_state
        else:
            several.setdefault(tuple(map(str, fields)), []).append((state, rows))
    general = []
    for (_, shape, placement), of_form in several.items():
        row = _join(
            _with_states(f"{_prefix(tensors[0])}*", [state for state, _ in of_form]),
            [row for _, rows in of_form for row in rows],
        )
        general.append(replace(row, shape=shape, placement=placement))
    return general, rest


def _prefix(named: NamedTensor) -> str:
    """What precedes the parameter in the keys of a section with a name of its own: ``optimizer_1.``."""
    return "" if named.of is None else f"{named.of.dotted}."


def _common_value(rows: Sequence[ListedKey], field: str, of_model: Sequence[ListedKey | None]) -> str | None:
    """The common value of ``field``, in words; None if the rows differ in another way than their parameters do."""
    values = [getattr(row, field) for row in rows]
    if len(set(values)) == 1:
        return str(values[0])
    if field == "dtype":
        return None
    if all(row is None for row in of_model):  # an optimizer by ids: it is not known which parameter is which
        return SEVERAL
    return IN_MODEL if values == [getattr(row, field, None) for row in of_model] else None
