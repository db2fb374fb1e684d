"""The options about units: collects them, reads and writes their files, and compares them with a checkpoint."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from fsdpckpt import flags
from fsdpckpt.errors import (
    NeedsInformationError,
    SourceCorruptError,
    SourceMissingError,
    SourceUnrecognisedError,
    TargetExistsError,
    TargetUnwritableError,
    UsageError,
    of_option,
    to_copy,
    to_look,
)
from fsdpckpt.flags import Message
from fsdpckpt.flat.match import FlatMatch
from fsdpckpt.flat.names import name_contradictions, order_contradictions
from fsdpckpt.flat.units.build import (
    Settings,
    expand_globs,
    innermost_unit,
    listed_keys,
    regrouped,
    returns_to_a_unit,
)
from fsdpckpt.flat.units.changes import NameChanges
from fsdpckpt.ir.checkpoint import Checkpoint, Layout, Section
from fsdpckpt.ir.dtypes import DType
from fsdpckpt.ir.listing import Listing
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.sections import alone
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.units import Groups, Units, unit_text
from fsdpckpt.ir.units_json import MAX_BYTES, UNITS_FILE, encode, parsed, render, units_in
from fsdpckpt.readers.protocol import MANIFEST, Locate
from fsdpckpt.storage import ByteSource, is_url
from fsdpckpt.storage.local_target import replace_file
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.listings import listed_names, model_names, optimizer_names
from fsdpckpt.transform.parameter_order import split_by_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitsRequest(Settings):
    """The options about units, including settings; None (and empty) for those not given.

    ``file``: a units file. ``globs``: module paths of units, ``("none",)`` for the root alone. ``reference``: a
    checkpoint with names and shapes. ``parameters``: names in the order of ``model.parameters()``, or in that of an
    optimizer whose ids are to get names; ``parameter_groups``: how blank lines divide them. ``buffers``: globs
    of model keys that are not parameters, ``("none",)`` if all are parameters. ``one_group``: all ranks shard together,
    even if units of a different run have HYBRID_SHARD. ``changes``: what was done to the source's names, which these
    options may use in place of the target's. ``sections``: the labels of the named section that is asked about, and
    of its model.
    """

    file: str | None = None
    globs: tuple[str, ...] = ()
    reference: str | None = None
    parameters: tuple[str, ...] | None = None
    parameter_groups: Groups = ()
    buffers: tuple[str, ...] = ()
    one_group: bool = False
    changes: NameChanges | None = None
    sections: tuple[str, ...] = ()

    def names_in(self, names: Iterable[str], present: Collection[str]) -> dict[str, str]:
        """Each of ``names``, an option's, with its name among ``present``, the target's; without what is left out."""
        return {name: name for name in names} if self.changes is None else self.changes.follow(names, present)


@dataclass(frozen=True, slots=True, eq=False)
class ResolvedUnits:
    """Units, what proves them (for messages), and for a source what each of its keys is.

    ``how``: where they come from and what was compared. ``open_settings``: those that make no difference to the
    source's bytes and so cannot be read from them. ``order_known``: False if the order of ``model.parameters()`` is
    known only within each unit. ``doubts``: warnings of what is assumed, and not proved.
    """

    units: Units
    match: FlatMatch | None
    how: tuple[str, ...]
    open_settings: tuple[str, ...] = ()
    order_known: bool = True
    doubts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "how", tuple(map(Message, self.how)))


def require_model_order(resolved: ResolvedUnits, source: str) -> None:
    """Raises NeedsInformationError unless ``resolved`` has the order of ``model.parameters()``, which units record."""
    if not resolved.order_known:
        raise order_unknown(source, "the names come from the optimizer, which shows only the order within each unit")


def order_unknown(
    source: str, reason: str, details: Sequence[str] = (), *, command: str | None = None
) -> NeedsInformationError:
    """``command``: what makes a units file from the base model that the names come from."""
    options = (
        f"{flags.parameters('FILE')} (the names of model.named_parameters(), one per line), {flags.reference('PATH')} "
        f"of a checkpoint that PyTorch wrote, or {flags.units('FILE')}"
    )
    return NeedsInformationError(
        f"the order of the parameters of {source} is not known: {reason}",
        details=details,
        why="flat parameters and ids follow model.parameters(); safetensors files, some DCP directories and some "
        "scripts sort or reorder their keys, and FSDP1 lists an optimizer's parameters unit by unit",
        next_step=f"add {options}"
        if command is None
        else to_copy(f"make a units file, then add {flags.units}", command),
        alternative=None if command is None else f"add {options}",
    )


def load_units(path: str, sources: Sources, labels: Sequence[str] = ()) -> Units | None:
    """The units in the file at ``path``: a units file, or the ``fsdpckpt.json`` of a flattened target.

    ``labels``: of the named section that they are for, and of its model: units that record several optimizers get the
    groups of this one. None if the file has only units of other sections. Raises SourceError.
    """
    entry = sources.stat(path) if path else None
    if entry is None or entry.directory:
        raise _no_file(path, directory=entry is not None)

    def parse(file: ByteSource) -> object:
        return parsed(file.read(0, min(file.nbytes, MAX_BYTES + 1)), source=path)

    # Each section asks for its own units; the file is read and parsed once.
    units = units_in(sources.parsed(path, parse), source=path, labels=labels)
    return units if units is None else units.of_optimizer(_optimizer_names_in(labels)) or units


def _optimizer_names_in(labels: Sequence[str]) -> list[str]:
    """The names of the optimizers among ``labels`` of sections."""
    of_optimizers = f"{Section.OPTIM}:"
    return [label.removeprefix(of_optimizers) for label in labels if label.startswith(of_optimizers)]


def _no_file(path: str, *, directory: bool) -> SourceMissingError:
    names = (os.path.join(path, name) for name in (UNITS_FILE, MANIFEST))
    inside = next((name for name in names if directory and os.path.isfile(name)), None)
    folder = path if directory else os.path.dirname(path) or "."
    if inside is not None:
        next_step: str = f"{flags.units(inside)}"
    else:
        listed = folder if os.path.isdir(folder) else "."
        next_step = to_look("see what is there", f"ls {shlex.quote(listed)}")
    return SourceMissingError(
        f"{flags.units(path)} is a directory" if directory else f"{flags.units(path)} does not exist",
        file=path,
        expected="the file that save_units or `fsdpckpt units` wrote, or the fsdpckpt.json of a flattened target",
        next_step=next_step,
    )


def of_same_section(reference: Checkpoint, labels: Sequence[str]) -> Checkpoint:
    """What ``reference`` says of the named section that has the first of ``labels`` that it knows: that section alone.
    Itself if it knows none.
    """
    by_label = {named.label: named for named in reference.named}
    same = next((by_label[label] for label in labels if label in by_label), None)
    return reference if same is None else alone(reference, same)


def reference_names(path: str, labels: Sequence[str], sources: Sources) -> Listing:
    """The names and shapes of the checkpoint at ``path``; ``labels``: as for ``of_same_section``.

    Raises SourceUnrecognisedError if it has none.
    """
    from fsdpckpt.readers.detect import open_checkpoint

    with of_option(flags.reference):
        checkpoint = of_same_section(open_checkpoint(path, sources=sources, locate=Locate.NOTHING), labels)
    names = model_names(checkpoint, path) or optimizer_names(checkpoint, f"the optimizer of {path}")
    if names is None:
        raise SourceUnrecognisedError(
            f"{path} has no names and shapes, so it cannot be a reference",
            file=path,
            expected="a full or sharded model state dict",
            found=f"a checkpoint that is {checkpoint.layout}",
            next_step=f"{flags.reference('PATH')} of a full or sharded checkpoint of the same model",
        )
    return replace(names, from_reference=True)


def target_file(request: UnitsRequest, present: Collection[str], sources: Sources) -> Units | None:
    """The units in the file of ``request``, with the names of the target, ``present``; None without a file."""
    if request.file is None:
        return None
    units = load_units(request.file, sources, request.sections)
    if units is None:
        return None
    names = request.names_in(units.params(), present)
    as_in_file = len(names) == len(units.params()) and all(old == new for old, new in names.items())
    return units if request.changes is None or as_in_file else request.changes.applied_to(units)


def target_reference(request: UnitsRequest, present: Collection[str], sources: Sources) -> Listing | None:
    """The names of the reference of ``request``, as the target, ``present``, has them; None without a reference."""
    if request.reference is None:
        return None
    names = reference_names(request.reference, request.sections, sources)
    name_of = request.names_in([param.name for param in names.params], present)
    return names.selected(name_of)


def find_disagreement(
    units: Units, request: UnitsRequest, sources: Sources, described: str, *, of_model: bool = False
) -> SourceCorruptError | None:
    """The error if other options contradict ``units``; ``described``: their name in the message. ``of_model``: as for
    ``option_contradictions``.
    """
    wrong = option_contradictions(units, request, sources, of_model=of_model)
    if not wrong:
        return None
    options = {flags.unit: request.globs, flags.parameters: request.parameters, flags.reference: request.reference}
    given = [f"{option}" for option, value in options.items() if value]
    return SourceCorruptError(
        f"{' and '.join(given)} {'contradicts' if len(given) == 1 else 'contradict'} {described}",
        details=wrong,
        why="what was given describes a different model, wrapping or version of this one",
        next_step=f"drop {' and '.join(given)}, or give what belongs to this model",
    )


def option_contradictions(
    units: Units, request: UnitsRequest, sources: Sources, *, of_model: bool = False
) -> list[str]:
    """What ``--unit``, ``--parameters`` and ``--reference`` contradict in ``units``; empty if they agree.

    ``of_model``: whether they are those of a model without its optimizer. They say nothing of the order in which that
    lists the parameters, and ``--parameters`` may have it.
    """
    wrong = list(_wrapping_contradictions(units, request.globs))
    if request.parameters is not None:
        given = tuple(request.names_in(request.parameters, units.parameters).values())
        agreed = _lists_groups(units, given) or (of_model and sorted(given) == sorted(units.parameters))
        wrong += () if agreed else _order_contradictions(units, given)
    names = target_reference(request, units.parameters, sources)
    if names is not None:
        contradicted = [*name_contradictions(units, names, whole_model=False)]
        if not contradicted and names.ordered:
            order = [param.name for param in names.params]
            contradicted += order_contradictions(units, order, names.source, across=names.in_model_order)
        wrong += contradicted
    return wrong


def _order_contradictions(units: Units, given: Sequence[str]) -> Iterator[str]:
    for number, (listed, name) in enumerate(zip_longest(given, units.parameters)):
        if listed != name:
            yield f"parameter {number} is {name} in the units, {listed} in {flags.parameters}"


def _lists_groups(units: Units, given: Sequence[str]) -> bool:
    """Whether ``given`` lists the groups of ``units``, one after the other, in the order of their ids."""
    named = units.named_groups() or ()
    if sum(map(len, named)) != len(given) or units.groups is None:
        return False
    parts = split_by_sizes(given, list(map(len, named)))
    if [*map(set, parts)] != [*map(set, named)]:
        return False
    # A list that comes back to a flat parameter says nothing of the order of flat parameters.
    says_nothing = not units.use_orig_params and any(returns_to_a_unit(units, part) for part in parts)
    return says_nothing or regrouped(units, parts) == units.groups


def _wrapping_contradictions(units: Units, globs: tuple[str, ...]) -> Iterator[str]:
    if not globs:
        return
    names = [param.name for param in units.params().values()]
    prefixes = {"", *expand_globs(globs, names)}
    for unit in units.units:
        misplaced = next(
            (param.name for param in unit.params if innermost_unit(param.name, prefixes) != unit.prefix), None
        )
        if misplaced is not None:
            by_globs = innermost_unit(misplaced, prefixes) or ""
            yield f"{misplaced} is in {unit} according to the units, in {unit_text(by_globs)} according to {flags.unit}"


def contradictions(units: Units, checkpoint: Checkpoint, *, dtype: DType | None = None) -> list[str]:
    """Everything in ``checkpoint`` (logical, its optimizer keyed by name) that contradicts ``units``; empty if they
    match.

    ``dtype``: what the model section is cast to, None if it is not.
    """
    result: list[str] = []
    if checkpoint.model is not None:
        label = "the model section"
        names = model_names(checkpoint, label) or Listing((), label, ordered=False)
        result.extend(name_contradictions(units, names, dtype=dtype))
        if names.ordered and checkpoint.layout is not Layout.FLATTENED:
            result.extend(order_contradictions(units, [param.name for param in names.params], label))
    if checkpoint.optim is not None and checkpoint.optim.key_type != "id":
        result.extend(_optimizer_contradictions(units, checkpoint.optim))
        result.extend(_group_contradictions(units, checkpoint.optim))
    return result


def _optimizer_contradictions(units: Units, optim: Optimizer) -> Iterator[str]:
    params = units.params()
    listed = {name for group in listed_names(optim) for name in group}
    for key, states in optim.state.items():
        name = clean(str(key))
        param = params.get(name)
        tensors = [leaf for leaf in states.values() if isinstance(leaf, Tensor)]
        if param is None:
            # An entry that no group lists is the user's own (TorchRec's keyed optimizers have them).
            if tensors and (name in listed or not listed):
                yield f"the optimizer has states of {name}, which the units do not have"
            continue
        # They may have other shapes than their parameter (factors), but not all the same other shape.
        shapes = {leaf.shape for leaf in tensors if leaf.numel > 1}
        if len(shapes) == 1 and param.shape not in shapes:
            yield f"{name}: {list(param.shape)} in the units, its optimizer states are {list(next(iter(shapes)))}"
    for later, first in units.shared:
        if optim.state.get(first) and optim.state.get(later):
            yield f"the optimizer has states for {first} and for {later}, which are one parameter in the units"


def _group_contradictions(units: Units, optim: Optimizer) -> Iterator[str]:
    if optim.groups is None:
        return
    listed = listed_names(optim)
    params = set(units.params())
    unknown = [name for group in listed for name in group if name not in params]
    with_state = {clean(str(key)) for key, states in optim.state.items() if states}  # reported already
    yield from (
        f"the param groups list {name}, which the units do not have" for name in unknown if name not in with_state
    )
    times = Counter(name for names in listed for name in set(names))
    yield from (f"{name} is in {count} param groups" for name, count in times.items() if count > 1)
    if unknown or units.groups is None:
        return
    if len(units.groups) != len(listed):
        yield f"the optimizer has {len(listed)} param groups, the units have {len(units.groups)}"
        return
    keys = listed_keys(units, listed)
    # The checkpoint need not contain unmanaged parameters: another part of the job may save them.
    optional = {param.name for param in units.unmanaged}.union(*keys)
    for number, (actual, expected) in enumerate(zip(keys, units.groups, strict=True)):
        for key in sorted({*actual} - {*expected}):
            yield f"param group {number} lists {key}, and the units do not"
        for key in sorted({*expected} - optional):
            yield f"no param group lists {key}, which is in group {number} of the units"


def units_path(path: str) -> str:
    """The file for ``path``: itself if it ends in ``.json``, else ``units.json`` in that directory."""
    if path.endswith(".json") and not os.path.isdir(path):
        return path
    return os.path.join(path, UNITS_FILE)


def write_units(units: Units, target: str, *, how: Sequence[str] = ()) -> bytes:
    """Write ``units`` to the file ``target``, durably and at once; ``how`` as for ``encode``.

    Returns its content. Makes missing directories; replaces an earlier units file. Raises TargetUnwritableError,
    TargetExistsError.
    """
    if is_url(target):
        raise UsageError(
            f"{target}: units files are written to local disks only",
            next_step="write it to a local file and copy that beside the checkpoint",
        )
    require_replaceable(target)
    content = render(encode(units, how=how)).encode()
    try:
        os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
        replace_file(target, content)
    except OSError as error:
        raise TargetUnwritableError(f"{target}: {error.strerror or error}", file=target) from error
    return content


_UNITS_HEAD = re.compile(rb'\s*\{\s*"format"\s*:\s*"fsdpckpt-units"')  # how every units file begins


def require_replaceable(path: str) -> None:
    """Raises TargetExistsError for a file at ``path`` that is never replaced: one that has content, and no units."""
    if not os.path.lexists(path):
        return
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError:  # a directory, a dangling link, someone else's file
        head = b"?"
    if head and not _UNITS_HEAD.match(head):
        raise TargetExistsError(
            f"{path} exists and is not a units file",
            file=path,
            why="fsdpckpt replaces units files only: what is in it would be lost",
            next_step="give another file, or move this one away",
        )
