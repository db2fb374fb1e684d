"""Joins the parts of a checkpoint: at most one model and one optimizer, and all extras."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from fsdpckpt import flags
from fsdpckpt.errors import NeedsInformationError, SourceUnrecognisedError
from fsdpckpt.ir.adapters import without_adapter
from fsdpckpt.ir.checkpoint import (
    Checkpoint,
    Checksums,
    Container,
    Evidence,
    EvidenceKind,
    Layout,
    Ledger,
    ModelState,
    NamedSection,
    Note,
    Origin,
    Problem,
    Section,
)
from fsdpckpt.ir.frame import Frame, joined, placed
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.optimizer import Optimizer
from fsdpckpt.ir.sections import model_of, section_names
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value, replaced, walk, without
from fsdpckpt.producers import PLAIN
from fsdpckpt.readers.candidates import require_one_each
from fsdpckpt.readers.counted_steps import is_megatrons, with_step_of_each
from fsdpckpt.readers.flat_slices import convert_slices
from fsdpckpt.readers.masters import with_masters
from fsdpckpt.readers.named_parts import with_names
from fsdpckpt.readers.parts import EXTRA_STEMS, ReadPart, read_part
from fsdpckpt.readers.protocol import FileTable, KeyPath, dotted
from fsdpckpt.readers.torch_ranks import named_rank
from fsdpckpt.readers.torch_ranks.local_tensors import join_local_tensors
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import listed, shape_text, some_of, truncate

_MAX_VALUES = 4  # differing ranks in a message
_MAX_NAMES = 3  # names in a message
_MAX_KEYS = 8  # extras in a message
_FLAT = "flat_param"  # part of the names of flat parameters in every version of FSDP1


def join(
    source: str, parts: Sequence[ReadPart], files: FileTable, notes: Sequence[Note], sources: Sources
) -> Checkpoint:
    """Join all ``parts`` into one checkpoint. Raises what ``require_one_each`` does if two of them have the same
    section, NeedsInformationError if the model of one and the optimizer of another have no name in common, and
    SourceUnrecognisedError if none has a model or an optimizer.
    """
    if len(parts) > 1:
        parts = list(map(_as_extras_of_lightning, parts))
    parts = with_names(parts, source)
    require_one_each(source, parts, sources)
    with_model = next((part for part in parts if part.sections.model is not None), None)
    with_optim = next((part for part in parts if part.sections.optim is not None), None)
    if with_model and with_optim:
        notes = [*notes, *_unmatched_names(source, with_model, with_optim)]
    main = with_model or with_optim or next((part for part in parts if not part.auxiliary), parts[0])
    world_size = max(part.tree.world_size for part in parts if not part.auxiliary or part is main)
    # What each rank holds alone: local tensors that are parts of one, and slices of flat parameters.
    if with_model is not None:
        of_model = with_optim.sections.optim if with_optim is not None else None
        join_local_tensors(with_model.tree, with_model.sections, of_model)
    model = main.sections.model
    for part in parts:
        convert_slices(part.tree, part.sections, model, part.label, possible=files.may_hold_slices())
        problems = (_slices_of_one_rank(part), _reused_ids(part, model), _states_in_buffers(part))
        part.tree.problems += [problem for problem in problems if problem is not None]
    optim = with_optim.sections.optim if with_optim is not None else None
    if with_optim is not None and optim is not None and is_megatrons(with_optim.tree.root, with_optim.tree.flavor):
        optim, problem = with_step_of_each(optim, files)
        with_optim.tree.problems += [problem] if problem is not None else []
    # What no part has as a model or an optimizer.
    extra, rank_extra, named, frame, in_parts = _extras(parts)
    _require_more_than_extras(source, parts, extra)
    origin = Origin(
        source=source,
        layout=_layout(parts),
        container=main.tree.container,
        flavor=next((part.tree.flavor for part in parts if part.tree.flavor), PLAIN),
        world_size=world_size,
        nesting=_nesting(parts),
        frame=frame,
        flattened_keys=any(part.sections.flattened for part in parts),
        mesh_devices=frozenset(device for part in parts for device in part.tree.devices),
        keys_in_order=all(part.tree.keys_in_order for part in parts),
        extra_files={key: part.files_in(files) for key, part in in_parts.items() if part.auxiliary},
        section_files=frozenset().union(*(part.files_in(files) for part in parts if not part.auxiliary)),
    )
    ledger = Ledger(
        evidence=_evidence(parts),
        problems=tuple(problem for part in parts for problem in _problems(part)),
        notes=(*notes, *(note for part in parts for note in _notes(part))),
    )
    checkpoint = Checkpoint(
        origin=origin,
        files=files.files(),
        model=model,
        optim=optim,
        extra=extra,
        rank_extra=rank_extra,
        checksums=Checksums.joined(part.tree.checksums for part in parts),
        ledger=ledger,
        named=named,
        copies=main.tree.copies if main is with_model else {},
    )
    noted = checkpoint.noted(*_unmatched_names_of_sections(checkpoint))
    return with_masters(noted, sources)


def _as_extras_of_lightning(part: ReadPart) -> ReadPart:
    """``part`` as extras if it is Lightning's ``meta.pt``, even if they are a dict of tensors like a model."""
    if part.stem != "meta":
        return part
    return replace(read_part(replace(part.origin, extras=True), part.tree), file_numbers=part.file_numbers)


def _require_more_than_extras(source: str, parts: Sequence[ReadPart], extra: Mapping[Key, Value]) -> None:
    """Raises SourceUnrecognisedError if no part has a model or an optimizer, and nothing that may be one: settings,
    schedulers and random states say where a training stood, and are no checkpoint without the rest.
    """
    if any(part.section_names or part.sections.named for part in parts):
        return
    leaves = [leaf for part in parts for _, leaf in walk(part.tree.root) if isinstance(leaf, Tensor)]
    if any(leaf.ndim and leaf.dtype.kind == "float" for leaf in leaves):
        return
    raise SourceUnrecognisedError(
        f"{source} contains no model and no optimizer",
        details=[part.label for part in parts],
        file=source,
        expected="tensors by name, or the state dict of an optimizer",
        found=some_of(list(extra), _MAX_KEYS) or "nothing",
        why="it has only a checkpoint's extras: schedulers, random states, counters",
        next_step="give the directory that contains the model too",
    )


def _nesting(parts: Sequence[ReadPart]) -> dict[Section, KeyPath]:
    """The keys under which the main sections were saved in their files."""
    nesting: dict[Section, KeyPath] = {}
    for part in parts:
        paths = {Section.MODEL: part.sections.model_path, Section.OPTIM: part.sections.optim_path}
        for section, path in paths.items():
            if path is not None and section in part.main_sections:
                nesting[section] = path
    return nesting


def without_exports(parts: Sequence[ReadPart]) -> list[ReadPart]:
    """``parts`` without those that repeat a section of a DCP checkpoint in the same directory."""

    def is_export(part: ReadPart) -> bool:
        return any(
            other is not part
            and part.origin.directory == other.label.rstrip("/")
            and other.section_names & part.section_names
            for other in parts
            if other.tree.container is Container.DCP
        )

    return [part for part in parts if not is_export(part)]


def _unmatched_names(source: str, with_model: ReadPart, with_optim: ReadPart) -> list[Note]:
    """A note that lists the names in the optimizer that the model lacks.

    Names that differ only by a prefix match; names of flat parameters prove nothing. Raises NeedsInformationError if
    the two are in different parts and have no name in common: torchtune keeps its own names for the optimizer and saves
    the weights under Hugging Face's names.
    """
    model, optim = with_model.sections.model, with_optim.sections.optim
    if model is None or optim is None:
        return []
    missing, named = _names_without_parameter(model, optim)
    if not missing:
        return []
    has_ids = len(named) < len(set(optim.grouped_keys()))  # beside texts that are no names
    if len(missing) < len(named) or with_model is with_optim or has_ids:
        return [_unmatched(missing)]
    raise NeedsInformationError(
        f"{source} contains a model and an optimizer with no parameter name in common",
        details=[
            f"{with_model.label}: {some_of(list(model.params), _MAX_NAMES)}",
            f"{with_optim.label}: {some_of(missing, _MAX_NAMES)}",
        ],
        why="they belong to different models, or a tool renamed the parameters of one of them (torchtune saves weights "
        "under Hugging Face's names, and its optimizer under its own)",
        next_step=f"give the path of one of them, for example {shlex.quote(with_model.label)}",
        file=source,
    )


def _unmatched_names_of_sections(checkpoint: Checkpoint) -> list[Note]:
    """The same notes for the optimizers of further models, each with the model that it updates."""
    notes: list[Note] = []
    for section in checkpoint.named:
        optim = section.content
        if not isinstance(optim, Optimizer) or (model := model_of(checkpoint, section)) is None:
            continue
        missing, _ = _names_without_parameter(model, optim)
        if missing:
            note = _unmatched(missing)
            notes.append(replace(note, message=f"{section.label}: {note.message}"))
    return notes


def _unmatched(missing: Sequence[str]) -> Note:
    keys = "1 optimizer key is" if len(missing) == 1 else f"{len(missing)} optimizer keys are"
    message = f"{keys} none of the model's: {some_of(missing, _MAX_NAMES)}"
    return Note("unmatched", message, keys=tuple(missing), for_verify=True)


def _names_without_parameter(model: ModelState, optim: Optimizer) -> tuple[list[str], list[str]]:
    """The names in ``optim`` that ``model`` lacks, and all names in it; none if it is keyed by id."""
    if optim.key_type != "name":
        return [], []
    named = list(dict.fromkeys(key for key in (*optim.state, *optim.grouped_keys()) if isinstance(key, str)))
    params = {clean(name) for name in model.params}
    without = without_adapter(map(clean, named), params)
    missing = [
        name for name, bare in zip(named, without, strict=True) if name not in model.params and bare not in params
    ]
    if not missing or any(_FLAT in name for name in (*model.params, *named)):
        return [], named
    ends = {end for name in params for end in _suffixes(name)}
    cleaned = {name: clean(name) for name in missing}
    missing = [name for name, plain in cleaned.items() if plain not in ends and params.isdisjoint(_suffixes(plain))]
    return missing, named


def _suffixes(name: str) -> list[str]:
    """``a.b.c``: itself, ``b.c`` and ``c``."""
    words = name.split(".")
    return [".".join(words[at:]) for at in range(len(words))]


def _is_in_one_of(holders: Collection[frozenset[int]], ranks: Set[int]) -> bool:
    return any(ranks <= each for each in holders)


def _reused_ids(part: ReadPart, model: ModelState | None) -> Problem | None:
    """A fatal problem if one id of an optimizer stands for different parameters on different ranks.

    Pipeline stages and experts have their own parameters, each counted from 0. Every rank of a mesh holds a part of the
    same parameters, so an id whose parts are on ranks that share no parameter is several parameters.
    """
    optim = part.sections.optim
    if optim is None or optim.key_type != "id" or model is None or part.tree.container is not Container.TORCH:
        return None
    leaves = [leaf for leaf in model.params.values() if isinstance(leaf, Tensor) and leaf.sharded]
    holders = {frozenset(leaf.chunks.rank.tolist()) for leaf in leaves if leaf.numel}
    if all(ranks & others for ranks in holders for others in holders):
        return None
    for key, states in optim.state.items():
        leaves = [leaf for leaf in states.values() if isinstance(leaf, Tensor) and leaf.sharded]
        of_several = [leaf for leaf in leaves if not _is_in_one_of(holders, set(leaf.chunks.rank.tolist()))]
        if of_several:
            message = (
                f"id {key} means different parameters on different ranks: the model's parameters are not the same on "
                "all of them, as with pipeline stages, and every rank counts its own. Save the optimizer by name, with "
                f"get_optimizer_state_dict; {flags.only('model')} converts the rest"
            )
            return Problem("parameter-order", message, file=part.label, key=str(key), section=Section.OPTIM)
    return None


def _slices_of_one_rank(part: ReadPart) -> Problem | None:
    """A fatal problem if a single torch file, whose name shows that it is one rank's, may hold this rank's slices. An
    optimizer with a state of two dimensions, or with no states, is whole.
    """
    named, optim, tree = named_rank(part.stem), part.sections.optim, part.tree
    is_single_file = tree.container is Container.TORCH and tree.world_size <= 1
    if named is None or named.bare or optim is None or not is_single_file:
        return None
    leaves = [leaf for entry in optim.state.values() for leaf in entry.values() if isinstance(leaf, Tensor)]
    if max(named.world or 0, named.rank + 1) < 2 or {leaf.ndim for leaf in leaves if leaf.ndim} != {1}:
        return None
    message = (
        f"{part.label} is named as the file of rank {named.rank}, and its optimizer may be in FSDP1's slices: give the "
        f"directory with the files of all {'' if named.world is None else f'{named.world} '}ranks"
    )
    return Problem("missing-rank", message, file=part.label, rank=named.rank, section=Section.OPTIM)


def _layout(parts: Sequence[ReadPart]) -> Layout:
    layouts = {part.tree.layout for part in parts if not part.auxiliary} or {part.tree.layout for part in parts}
    return next((layout for layout in (Layout.FLATTENED, Layout.SHARDED) if layout in layouts), Layout.FULL)


def _evidence(parts: Sequence[ReadPart]) -> tuple[Evidence, ...]:
    evidence: list[Evidence] = []
    for part in parts:
        message = f"{part.label}: {' and '.join(sorted(part.section_names)) or 'extra entries'}"
        evidence += [Evidence(EvidenceKind.SECTIONS, message), *part.tree.evidence]
    return tuple(evidence)


def _notes(part: ReadPart) -> list[Note]:
    ids_are_text = part.tree.container is Container.DCP  # always
    return [*part.tree.notes, *part.sections.all_notes(ids_are_text=ids_are_text)]


def _states_in_buffers(part: ReadPart) -> Problem | None:
    """A fatal problem if ``part`` is Megatron-LM's ``distrib_optim.pt``: each of its tensors holds many parameters, and
    the optimizer in the file beside it has no states (``DistributedOptimizer.save_parameter_state``).
    """
    root = part.tree.root
    if not isinstance(root, dict) or "buckets_coalesced" not in root:
        return None
    message = (
        f"{part.label} has the optimizer's states as Megatron's buffers, and only the model's code says which elements "
        "belong to which parameter: save with --ckpt-format torch_dist and --dist-ckpt-optim-fully-reshardable"
    )
    return Problem("flattened", message, file=part.label, section=Section.OPTIM)


def _problems(part: ReadPart) -> list[Problem]:
    """The problems of the tree, and values of the model or the optimizer that differ between ranks."""
    problems = [*part.tree.problems, *part.tree.missing.values()]
    for path, values in part.tree.rank_values.items():
        if part.sections.overlaps(path):
            key = dotted(path)
            place = part.sections.place_of(path)
            section = place if isinstance(place, Section) else place.section
            message = f"{key} is not the same on every rank{_values_text(values)}"
            problems.append(Problem("replica", message, file=part.label, key=key, section=section))
    return problems


def _values_text(values: Sequence[Value]) -> str:
    """``: 0.1 on ranks 0, 2; 0.2 on rank 1``; empty if short texts do not distinguish the values."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        text = (
            f"a tensor {value.dtype.name} {shape_text(value.shape)}" if isinstance(value, Tensor) else truncate(value)
        )
        ranks_of.setdefault(text, []).append(rank)
    if len(ranks_of) == 1:
        return ""
    parts = [f"{text} on {'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}" for text, ranks in ranks_of.items()]
    return ": " + "; ".join(parts[:_MAX_VALUES]) + ("; ..." if len(parts) > _MAX_VALUES else "")


class _Extras(NamedTuple):
    """``common``: the extras of all ranks, with rank 0's values where ranks differ. ``of_ranks``: as each rank saved
    them, empty if all saved the same; a key that a rank lacks is missing. ``named``: the named sections, which have
    places among the extras, in the containers of ``frame``. ``parts``: the part that each key at the top is from.
    """

    common: dict[Key, Value]
    of_ranks: tuple[dict[Key, Value], ...]
    named: tuple[NamedSection, ...]
    frame: Frame
    parts: dict[Key, ReadPart]


def _extras(parts: Sequence[ReadPart]) -> _Extras:
    extra: dict[Key, Value] = {}
    in_parts: dict[Key, ReadPart] = {}
    named: list[NamedSection] = []
    frame: Frame = None
    changes: list[tuple[KeyPath, tuple[Value, ...]]] = []
    absences: list[tuple[KeyPath, frozenset[int], int]] = []  # with the number of ranks of the part
    for part in parts:
        below, tree, sections = part.sections.extra, part.tree, part.sections
        prefix: KeyPath = ()
        may_be_at_top = len(parts) == 1 or not part.auxiliary or part.stem in EXTRA_STEMS
        if may_be_at_top and not below.keys() & extra.keys():
            extra.update(below)
        else:
            stem = part.stem
            while stem in extra:
                stem += "_"
            if below or (part.auxiliary and not sections.named):
                extra[stem] = tree.root if part.auxiliary and not sections.named else dict(below)
            prefix = (stem,)
        in_parts |= dict.fromkeys(extra.keys() - in_parts.keys(), part)
        named += [replace(section, path=(*prefix, *section.path)) for section in sections.named]
        frame = joined(frame, placed(None, prefix, sections.frame))
        changes += [
            ((*prefix, *path), values) for path, values in tree.rank_values.items() if not sections.overlaps(path)
        ]
        absences += [
            ((*prefix, *path), ranks, tree.world_size)
            for path, ranks in tree.absences.items()
            if not sections.owns(path)
        ]
    if not changes and not absences:
        return _Extras(extra, (), _with_names(named), frame, in_parts)
    common: Value = extra
    for path, values in changes:
        common = replaced(common, path, values[0]) if values and values[0] is not None else common
    for path, _, _ in absences:
        common = without(common, path)
    of_ranks: list[dict[Key, Value]] = []
    for rank in range(max([*(len(values) for _, values in changes), *(ranks for *_, ranks in absences)])):
        of_rank: Value = extra
        for path, values in changes:
            of_rank = replaced(of_rank, path, values[rank]) if rank < len(values) else without(of_rank, path)
        for path, absent_ranks, ranks in absences:
            of_rank = without(of_rank, path) if rank in absent_ranks or rank >= ranks else of_rank
        of_ranks.append(of_rank if isinstance(of_rank, dict) else {})
    common = common if isinstance(common, dict) else extra
    return _Extras(common, tuple(of_ranks), _with_names(named), frame, in_parts)


def _with_names(named: Sequence[NamedSection]) -> tuple[NamedSection, ...]:
    """``named``, which come from several parts, with names that are unique among them."""
    renamed: dict[int, NamedSection] = {}
    for section in (Section.MODEL, Section.OPTIM):
        numbers = [number for number, each in enumerate(named) if each.section is section]
        names = section_names([named[number].path for number in numbers])
        renamed |= {number: replace(named[number], name=name) for number, name in zip(numbers, names, strict=True)}
    return tuple(renamed[number] for number in range(len(named)))
