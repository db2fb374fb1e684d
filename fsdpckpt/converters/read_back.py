"""Reads the output back, and pairs each tensor that was planned with the one that was written for it.

What is missing, has another form or should not be there is an error of this program: the output is discarded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdpckpt.converters.lay_out import dtype_rule
from fsdpckpt.converters.steps.draft import TransformedCheckpoint
from fsdpckpt.errors import FsdpckptError, InternalError
from fsdpckpt.flat.match import Mismatch, match
from fsdpckpt.ir.checkpoint import Checkpoint, NamedSection, NamedTensor, Section, SourceFile
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.row_names import normalise
from fsdpckpt.ir.sections import alone, main_alone
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.text_keys import LostDict
from fsdpckpt.ir.units import Units
from fsdpckpt.ir.values import Key
from fsdpckpt.options import ConvertOptions, VerifyLevel
from fsdpckpt.readers.detect import OpenOptions, open_checkpoint
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.order_sources import from_units
from fsdpckpt.transform.rekey import to_names
from fsdpckpt.writers.dtensor_pickle import has_fsdp_empties, target_version


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of the source, and what was written for it. ``name``: ``<section> <key>``.

    ``unique``: False if several keys have the same text, as 0 and "0". Their names end in a number then, and their
    digests are not recorded.
    """

    name: str
    source: Tensor
    written: Tensor
    unique: bool = True


def read_back(
    transformed: TransformedCheckpoint, path: str, options: ConvertOptions, opener: Sources, lost: tuple[LostDict, ...]
) -> tuple[list[Pair], Sequence[SourceFile]]:
    """With ``--verify full``, pair every tensor of ``transformed`` with the one written for it; also return the files
    of the output. ``opener`` opens the output. Raises InternalError if the tensors are not the same.
    """
    expected = transformed.checkpoint
    compares = options.verify is VerifyLevel.FULL
    opened = _reopen(path, opener, transformed.units, lost, locate=Locate.ALL if compares else Locate.NOTHING)
    wrong = [problem.message for problem in opened.problems if problem.fatal or not problem.loads]
    written = _by_name(opened, transformed, path)
    empty = _without_elements([transformed.units, *(section.units for section in expected.named)])
    found = _Written(written, empty)
    pairs: list[Pair] = []
    dtypes = dtype_rule(options)
    for planned in _comparable(expected, empty):
        match_of = found.take(planned)
        problem = _difference(planned, match_of, dtypes.of_named(expected, planned), options)
        if problem is not None:
            wrong.append(f"{planned.section} {planned.key} {problem}")
        elif match_of is not None and compares:
            unique = found.is_unique(planned)
            name = f"{planned.section} {planned.key}" + ("" if unique else f" {found.left_under_key(planned)}")
            pairs.append(Pair(name, planned.tensor, match_of.tensor, unique))
    # DCP makes every key text: extras may then read as a section that the source did not have.
    places = set(map(_section_and_place, expected.tensors()))
    for stray in found.left():
        if _section_and_place(stray) in places:
            wrong.append(f"{stray.section} {stray.key} was written and should not be there")
    if wrong:
        raise not_as_planned(path, wrong)
    return pairs, written.files


class _Written:
    """The tensors of the output that no planned one has been paired with yet."""

    def __init__(self, written: Checkpoint, empty: Collection[str]) -> None:
        self._by_key: dict[tuple[Section, str], list[NamedTensor]] = {}  # several where 0 and "0" are keys, in order
        for each in _comparable(written, empty):
            self._by_key.setdefault((each.section, each.key), []).append(each)
        self._counts = {key: len(others) for key, others in self._by_key.items()}
        # A named section may read back as extras where the file shows no other model beside it.
        self._extras = {each.key: each for each in written.tensors() if each.section is Section.EXTRA}

    def take(self, planned: NamedTensor) -> NamedTensor | None:
        """The next tensor under the key of ``planned``; None if it was not written."""
        others = self._by_key.get((planned.section, planned.key))
        return others.pop(0) if others else self._extras.get(_place_in_extras(planned))

    def is_unique(self, planned: NamedTensor) -> bool:
        return self._counts.get((planned.section, planned.key), 1) == 1

    def left_under_key(self, planned: NamedTensor) -> int:
        return len(self._by_key.get((planned.section, planned.key), ()))

    def left(self) -> Iterator[NamedTensor]:
        for others in self._by_key.values():
            yield from others


def _difference(planned: NamedTensor, written: NamedTensor | None, dtype: DType, options: ConvertOptions) -> str | None:
    """How ``written`` differs from ``planned``, which has ``dtype`` in the output; None if it has the same form."""
    if written is None:
        return "was not written"
    tensor = written.tensor
    if (tensor.shape, tensor.dtype) != (planned.tensor.shape, dtype):
        return f"was written as {_form_text(tensor, tensor.dtype)}, not as {_form_text(planned.tensor, dtype)}"
    if _cut_by_fsdp(planned.tensor) and not _cut_by_fsdp(tensor) and _has_fsdp_empties(options):
        return "was written with empty shards in other shapes than FSDP2's"
    return None


def _without_elements(units: Iterable[Units | None]) -> set[str]:
    """The parameters without elements, which no flat parameter shows."""
    params = (param for each in units if each is not None for param in each.params().items())
    return {name for name, param in params if not param.numel}


def _section_and_place(tensor: NamedTensor) -> tuple[Section, tuple[Key, ...] | None]:
    """The section that ``tensor`` is in, and where that is if it is a named one."""
    return tensor.section, None if tensor.of is None else tensor.of.path


def not_as_planned(path: str, wrong: Sequence[str]) -> InternalError:
    """The error for an output that differs from what was planned."""
    return InternalError(
        f"the output does not read back as it was planned; {path} was discarded",
        details=wrong[:20],
        next_step="please report this with the command line and the output of `fsdpckpt inspect` on the source",
    )


def _reopen(
    path: str, sources: Sources, units: Units | None, lost: tuple[LostDict, ...], *, locate: Locate
) -> Checkpoint:
    try:
        # A configuration that was copied describes all of the model, of which options may have selected a part.
        known = OpenOptions(units=units, lost=lost, compare_config=False)
        return open_checkpoint(path, sources=sources, locate=locate, options=known)
    except FsdpckptError as error:  # our own output: an error in it is not the fault of the user's source
        raise InternalError(f"the output does not read back: {error.what}", details=error.details) from error


def _by_name(written: Checkpoint, transformed: TransformedCheckpoint, path: str) -> Checkpoint:
    """``written`` with the sections that were flattened as whole tensors by name."""
    units_at = {(named.section, named.path): named.units for named in transformed.checkpoint.named}
    sections: list[NamedSection] = []
    for named in written.named:
        units, content = units_at.get((named.section, named.path)), None
        if units is not None:
            view = _unflatten(alone(written, replace(named, units=units)), units, path)
            content = view.model if named.section is Section.MODEL else view.optim
        sections.append(named if content is None else replace(named, content=content))
    if transformed.units is None:
        return replace(written, named=tuple(sections))
    main = _unflatten(main_alone(written), transformed.units, path)
    return replace(written, model=main.model, optim=main.optim, named=tuple(sections))


def _unflatten(written: Checkpoint, units: Units, path: str) -> Checkpoint:
    """Flattened output as whole tensors by name, unflattened with the units it was written with."""
    from fsdpckpt.flat.unflatten import unflatten

    matched = match(written, units)
    if isinstance(matched, Mismatch):
        raise InternalError(
            f"the flattened output does not fit its own units; {path} was discarded",
            details=matched.contradictions[:20],
        )
    named, _ = normalise(unflatten(written, matched))  # names that are keys are those of the wrapped model
    if named.optim is None or named.optim.key_type != "id":
        return named
    return to_names(named, from_units(units, "the units it was written with"))  # NO_SHARD and one rank cut nothing


def _comparable(checkpoint: Checkpoint, empty: Collection[str]) -> Iterator[NamedTensor]:
    """The values to compare. Keys of the model and optimizer are the same in every container; keys of extras depend on
    it.

    ``empty``: parameters without elements, whose states have no place in slices.
    """
    for named in checkpoint.tensors():
        state = named.section is Section.OPTIM and named.state is not None and named.param not in empty
        if named.section is Section.MODEL or state:
            yield named


def _has_fsdp_empties(options: ConvertOptions) -> bool:
    return has_fsdp_empties(target_version(options.torch_version)[0])


def _cut_by_fsdp(tensor: Tensor) -> bool:
    return tensor.sharding is None or tensor.sharding.by_fsdp


def _place_in_extras(named: NamedTensor) -> str:
    """The key of a named section's tensor if it reads back as one of the extras; "" for any other tensor."""
    if named.of is None:
        return ""
    inner = named.key.removeprefix(f"{named.of.dotted}.")
    return f"{named.of.dotted}.state.{inner}" if named.section is Section.OPTIM else named.key


def _form_text(tensor: Tensor, dtype: DType) -> str:
    return f"{dtype.name} {list(tensor.shape)}"
