"""Join the parts of a checkpoint: at most one model and one optimizer, and all extras."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fsdpckpt.errors import NeedsInformationError, SourceIncompleteError
from fsdpckpt.ir.checkpoint import (
    BARE_VALUE,
    Checkpoint,
    Checksums,
    Container,
    Evidence,
    EvidenceKind,
    Layout,
    ModelState,
    Note,
    OptimState,
    Problem,
    Section,
)
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Value
from fsdpckpt.producers.forms import EXTRA_STEM
from fsdpckpt.readers.flat_slices import mark_slices, why_sliced
from fsdpckpt.readers.protocol import FileTable, Tree, glob_of
from fsdpckpt.readers.sections import Sections, replaced, split, without
from fsdpckpt.text import first_of, listed, shape_text, truncate

# A part of this name is a dict of extras itself; any other part's extras stand under the part's own name.
_EXTRA_STEMS = frozenset({EXTRA_STEM, "extra", "meta"})
_MOST_VALUES = 4  # of ranks that differ, in a message


_Change: TypeAlias = tuple[tuple[Key, ...], tuple[Value, ...]]
_Absence: TypeAlias = tuple[tuple[Key, ...], frozenset[int]]


@dataclass(slots=True)
class ReadPart:
    """One part after reading: its tree and its sections. ``label`` names it in messages."""

    label: str
    stem: str
    tree: Tree
    sections: Sections

    @property
    def auxiliary(self) -> bool:
        """Holds neither a model nor an optimizer."""
        return self.sections.model is None and self.sections.optim is None

    def whole(self) -> bool:
        """Whether every rank's file holds all of it, as far as this part alone shows."""
        optim = self.sections.optim
        if self.tree.layout is not Layout.FULL:
            return False
        return optim is None or why_sliced(optim.state, self.sections.model, self.tree.checksums) is None


def read_part(label: str, stem: str, tree: Tree, *, extras: bool = False) -> ReadPart:
    """Split ``tree`` into its sections. A part whose name says that it holds ``extras`` has nothing else in it."""
    if (extras or stem == EXTRA_STEM) and isinstance(tree.root, dict):
        return _of_extras(label, stem, tree, tree.root)
    return ReadPart(label, stem, tree, split(tree.root))


def _of_extras(label: str, stem: str, tree: Tree, root: dict[Key, Value]) -> ReadPart:
    return ReadPart(label, stem, tree, Sections(None, None, dict(root)))


def join(source: str, parts: Sequence[ReadPart], files: FileTable, *, flavor: str, notes: Sequence[Note]) -> Checkpoint:
    """One checkpoint of all ``parts``. Raises NeedsInformationError when two of them give the same section, or when
    the model of one and the optimizer of another have nothing in common."""
    if len(parts) > 1:
        parts = [_with_meta_as_extras(part) for part in parts]
    _require_one_each(source, parts)
    notes = [*notes, *_strange_names(source, parts)]
    main = next((part for part in parts if part.sections.model is not None), None)
    main = main or next((part for part in parts if part.sections.optim is not None), parts[0])
    world_size = max(part.tree.world_size for part in parts if not part.auxiliary or part is main)
    model = next((part.sections.model for part in parts if part.sections.model is not None), None)
    for part in parts:
        mark_slices(part.tree, part.sections, model, part.label)
        part.tree.problems.extend(_ids_of_other_parameters(part, model))
    optim = next((part.sections.optim for part in parts if part.sections.optim is not None), None)
    extra, prefixes = _extras(parts)
    changes, absences = _changes(parts, prefixes), _absences(parts, prefixes)
    return Checkpoint(
        source=source,
        layout=_layout(parts),
        container=main.tree.container,
        flavor=next((part.tree.flavor for part in parts if part.tree.flavor), flavor),
        world_size=world_size,
        files=files.files(),
        model=model,
        optim=optim,
        extra=_common(extra, changes, absences),
        rank_extra=_rank_extras(extra, changes, absences, world_size),
        checksums=Checksums.joined(part.tree.checksums for part in parts),
        evidence=_evidence(parts),
        problems=tuple(problem for part in parts for problem in _problems(part)),
        notes=(*notes, *(note for part in parts for note in _notes(part))),
        nesting=_nesting(parts),
        flattened_keys=any(part.sections.flattened for part in parts),
        mesh_devices=frozenset(device for part in parts for device in part.tree.devices),
        orders=next((part.tree.orders for part in parts if part.tree.orders), ()),
    )


def _with_meta_as_extras(part: ReadPart) -> ReadPart:
    """``part``, with Lightning's ``meta.pt`` as extras, even where they are a dict of tensors like a model."""
    if part.stem == "meta" and isinstance(part.tree.root, dict):
        return _of_extras(part.label, part.stem, part.tree, part.tree.root)
    return part


def _nesting(parts: Sequence[ReadPart]) -> dict[Section, tuple[Key, ...]]:
    """The keys under which the sections of DCP parts were saved, and have to be loaded."""
    nesting: dict[Section, tuple[Key, ...]] = {}
    for part in parts:
        sections = part.sections
        for section, path in ((Section.MODEL, sections.model_path), (Section.OPTIM, sections.optim_path)):
            if path is not None and part.tree.container is Container.DCP:
                nesting[section] = path
    return nesting


def without_exports(parts: Sequence[ReadPart]) -> tuple[list[ReadPart], list[str]]:
    """``parts`` without those that hold a section of a DCP checkpoint in the same directory again, and their names."""
    own = [part for part in parts if part.tree.container is Container.DCP]
    kept: list[ReadPart] = []
    left: list[ReadPart] = []
    for part in parts:
        again = any(
            one is not part
            and _folder(part.label) == one.label.rstrip("/")
            and (
                (part.sections.model is not None and one.sections.model is not None)
                or (part.sections.optim is not None and one.sections.optim is not None)
            )
            for one in own
        )
        (left if again else kept).append(part)
    return kept, [posixpath.basename(part.label) for part in left]


def _require_one_each(source: str, parts: Sequence[ReadPart]) -> None:
    models = [part.label for part in parts if part.sections.model is not None]
    optims = [part.label for part in parts if part.sections.optim is not None]
    for what, labels in (("model", models), ("optimizer", optims)):
        if len(labels) > 1:
            candidates = [part for part in parts if part.label in labels]
            if (absent := _rank_0_of_slices(candidates)) is not None:
                raise SourceIncompleteError(
                    f"{source}: what looks like slices of {len(labels)} ranks, without those of rank 0",
                    expected=posixpath.basename(absent),
                    found=first_of([posixpath.basename(label) for label in labels], 4),
                    file=absent,
                    rank=0,
                    why="all optimizer states in these files are one-dimensional, as FSDP1 cuts them, and the files "
                    "are numbered from 1",
                    next_step="copy the files of all ranks into one directory; or, if each is a checkpoint of its own, "
                    "give one as SRC",
                )
            raise NeedsInformationError(
                f"{source} holds {len(labels)} candidates for the {what}",
                details=labels,
                why="several checkpoints lie in one directory, or the same weights in several forms (files that a tool "
                "consolidated may hold zeros where the shards hold values)",
                next_step=_how_to_choose(source, labels, parts),
                file=source,
            )


def _rank_0_of_slices(parts: Sequence[ReadPart]) -> str | None:
    """The path of rank 0's file, where ``parts`` are numbered 1, 2, 3 and hold optimizers of vectors only."""
    numbered = [re.fullmatch(r"(.*\D)([1-9]\d*)", part.stem) for part in parts]
    words = [match.groups() for match in numbered if match is not None]
    numbers = sorted(int(number) for _, number in words)
    if len({name for name, _ in words}) != 1 or numbers != list(range(1, len(parts) + 1)):
        return None
    optims = [part.sections.optim for part in parts]
    leaves = [leaf for one in optims if one is not None for state in one.state.values() for leaf in state.values()]
    if None in optims or {leaf.ndim for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim} != {1}:
        return None
    return re.sub(rf"{words[0][1]}(\.[^./]*)$", r"0\1", parts[0].label)


def _how_to_choose(source: str, labels: Sequence[str], parts: Sequence[ReadPart]) -> str:
    """What to type: the path of one where directories lie side by side, else the options that leave one of them."""
    named = _readable(labels, parts)
    folders = [_folder(label) for label in labels]
    if posixpath.commonpath([folder or "." for folder in folders]) not in folders:
        return f"name the one to read, for example {shlex.quote(named)}"
    globs = {label: glob_of(label, source) for label in labels}
    trees = {part.label: part.tree for part in parts}

    def is_export(label: str) -> tuple[bool, bool, bool]:
        """The least is kept: the source itself, shards, what a training job writes."""
        tree = trees[label]
        return bool(globs[label]), tree.layout is Layout.FULL, tree.container == Container.SAFETENSORS

    kept = min(labels, key=is_export)
    ignored = " ".join(f"--ignore-file {shlex.quote(globs[label])}" for label in labels if label != kept)
    shown = "that one" if named == kept else shlex.quote(named)
    other = f"; or give {shown} as SRC" if named.rstrip("/") != source.rstrip("/") else ""
    return f"to read {kept}, add {ignored}{other}"


def _readable(labels: Sequence[str], parts: Sequence[ReadPart]) -> str:
    """What to give as SRC for the first of ``labels``: the directory of a set of files; its directory where that has
    no other candidate and holds more than this part; otherwise the path itself."""
    first, several, _ = labels[0].partition(" .. ")
    folder = _folder(first)
    alone = folder and all(_folder(label) != folder for label in labels[1:])
    if several or "*" in first or (alone and sum(_folder(part.label) == folder for part in parts) > 1):
        return folder
    return first


def _folder(label: str) -> str:
    return label.partition(" .. ")[0].rpartition("/")[0]


def _strange_names(source: str, parts: Sequence[ReadPart]) -> list[Note]:
    """Notes where names suggest that the model of one part and the optimizer of another do not belong together."""
    model = next((part for part in parts if part.sections.model is not None), None)
    optim = next((part for part in parts if part.sections.optim is not None), None)
    if model is None or optim is None or model is optim:
        return []
    names, state = model.sections.model, optim.sections.optim
    if names is None or state is None:
        return []
    return strange_names(source, (model.label, names.params), (optim.label, state))


def _ids_of_other_parameters(part: ReadPart, model: ModelState | None) -> Iterator[Problem]:
    """A fatal problem where one id of an optimizer stands for another parameter on some ranks.

    Pipeline stages, or experts, have parameters of their own and count them from 0 each. Every rank of a mesh holds a
    part of the same parameters, so an id whose parts lie on ranks that share no parameter is several parameters.
    """
    optim = part.sections.optim
    if optim is None or optim.key_type != "id" or model is None or part.tree.container is not Container.TORCH:
        return
    leaves = [leaf for leaf in model.params.values() if isinstance(leaf, Tensor) and leaf.sharded]
    holders = {frozenset(leaf.chunks.rank.tolist()) for leaf in leaves if leaf.numel}
    if all(one & other for one in holders for other in holders):
        return
    for key, states in optim.state.items():
        for leaf in states.values():
            if not isinstance(leaf, Tensor) or not leaf.sharded:
                continue
            ranks = frozenset(leaf.chunks.rank.tolist())
            if not any(ranks <= one for one in holders):
                message = (
                    f"id {key} of the optimizer is another parameter on some ranks: the model's parameters are not the "
                    "same on all of them, as with pipeline stages, and every rank counts its own. Save the optimizer "
                    "by name, with get_optimizer_state_dict; --only model converts the rest"
                )
                yield Problem("parameter-order", message, file=part.label, key=str(key), section=Section.OPTIM)
                return


def _layout(parts: Sequence[ReadPart]) -> Layout:
    layouts = {part.tree.layout for part in parts if not part.auxiliary} or {part.tree.layout for part in parts}
    for layout in (Layout.FLATTENED, Layout.SHARDED):
        if layout in layouts:
            return layout
    return Layout.FULL


def _evidence(parts: Sequence[ReadPart]) -> tuple[Evidence, ...]:
    evidence: list[Evidence] = []
    for part in parts:
        sections = [
            name
            for name, section in (("model", part.sections.model), ("optimizer", part.sections.optim))
            if section is not None
        ]
        message = f"{part.label}: {' and '.join(sections) or 'extra entries'}"
        evidence += [Evidence(EvidenceKind.SECTIONS, message), *part.tree.evidence]
    return tuple(evidence)


def _notes(part: ReadPart) -> list[Note]:
    notes = [*part.tree.notes, *part.sections.notes]
    if part.tree.container is Container.DCP:  # DCP always writes ids as strings: reading them back repairs no damage
        notes = [note for note in notes if note.kind != "ids-repaired"]
    return notes


def _problems(part: ReadPart) -> list[Problem]:
    """The problems of the tree, and values of the model or the optimizer that differ between ranks."""
    problems = list(part.tree.problems)
    for path, values in part.tree.rank_values.items():
        if part.sections.owns(_keys(path)):
            key = ".".join(map(str, path))
            section = Section.OPTIM if _under(path, part.sections.optim_path) else Section.MODEL
            message = f"{key} is not the same on every rank{_held_text(values)}"
            problems.append(Problem("replica", message, file=part.label, key=key, section=section))
    return problems


def _held_text(values: Sequence[Value]) -> str:
    """``: 0.1 on ranks 0, 2; 0.2 on rank 1``; empty where short texts do not tell the values of ranks apart."""
    held: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        text = (
            f"a tensor {value.dtype.name} {shape_text(value.shape)}" if isinstance(value, Tensor) else truncate(value)
        )
        held.setdefault(text, []).append(rank)
    if len(held) == 1:
        return ""
    parts = [f"{text} on {'rank' if len(ranks) == 1 else 'ranks'} {listed(ranks)}" for text, ranks in held.items()]
    return ": " + "; ".join(parts[:_MOST_VALUES]) + ("; ..." if len(parts) > _MOST_VALUES else "")


def _keys(path: tuple[Value, ...]) -> tuple[Key, ...]:
    return path  # type: ignore[return-value]  # paths are made of dict keys and list positions


def _under(path: tuple[Value, ...], prefix: tuple[Key, ...] | None) -> bool:
    return prefix is not None and path[: len(prefix)] == prefix


def _extras(parts: Sequence[ReadPart]) -> tuple[dict[Key, Value], list[tuple[Key, ...]]]:
    """All extras joined, and for each part the path below which its extras are."""
    extra: dict[Key, Value] = {}
    prefixes: list[tuple[Key, ...]] = []
    for part in parts:
        below = part.sections.extra
        top = len(parts) == 1 or not part.auxiliary or part.stem in _EXTRA_STEMS
        if top and not below.keys() & extra.keys():
            extra.update(below)
            prefixes.append(())
            continue
        stem = part.stem
        while stem in extra:
            stem += "_"
        if below or part.auxiliary:
            extra[stem] = part.tree.root if part.auxiliary else dict(below)
        prefixes.append((stem,))
    return extra, prefixes


def _changes(parts: Sequence[ReadPart], prefixes: Sequence[tuple[Key, ...]]) -> list[_Change]:
    """Where the extras differ between ranks: the path in the joined extras, and each rank's value."""
    changes: list[_Change] = []
    for part, prefix in zip(parts, prefixes, strict=True):
        for path, values in part.tree.rank_values.items():
            if not part.sections.owns(_keys(path)):
                changes.append(((*prefix, *_keys(path)), values))
    return changes


def _absences(parts: Sequence[ReadPart], prefixes: Sequence[tuple[Key, ...]]) -> list[_Absence]:
    """Keys of the joined extras that some ranks lack, with these ranks."""
    return [
        ((*prefix, *_keys(path)), ranks)
        for part, prefix in zip(parts, prefixes, strict=True)
        for path, ranks in part.tree.absences.items()
        if not part.sections.owns(_keys(path))
    ]


def _common(extra: dict[Key, Value], changes: Sequence[_Change], absences: Sequence[_Absence]) -> dict[Key, Value]:
    """What every rank has of ``extra``, with rank 0's values where ranks differ."""
    common: Value = extra
    for path, values in changes:
        if values and values[0] is not None:
            common = replaced(common, path, values[0])
    for path, _ in absences:
        common = without(common, path)
    return common if isinstance(common, dict) else extra


def _rank_extras(
    extra: dict[Key, Value], changes: Sequence[_Change], absences: Sequence[_Absence], world_size: int
) -> tuple[dict[Key, Value], ...]:
    """``extra`` as each rank saved it; empty when all saved the same. A key that a rank lacks is not in its own."""
    if not changes and not absences:
        return ()
    ranks = max((len(values) for _, values in changes), default=world_size)
    result: list[dict[Key, Value]] = []
    for rank in range(ranks):
        own_extra: Value = extra
        for path, values in changes:
            own_extra = replaced(own_extra, path, values[rank]) if rank < len(values) else without(own_extra, path)
        for path, lacking in absences:
            own_extra = without(own_extra, path) if rank in lacking else own_extra
        result.append(own_extra if isinstance(own_extra, dict) else {})
    return tuple(result)


_SHOWN = 3  # names in a message
_FLAT = "flat_param"  # in the names of flat parameters, of every version of FSDP1


def strange_names(source: str, model: tuple[str, Collection[str]], optim: tuple[str, OptimState]) -> list[Note]:
    """A note that lists the optimizer's names that the model lacks. ``model``, ``optim``: label and content of each.

    Names that differ only by a prefix match, and names of flat parameters say nothing. Raises
    NeedsInformationError when the two have no name in common: torchtune keeps its own names for the optimizer, and
    saves the weights under those of Hugging Face.
    """
    (where, names), (other, state) = model, optim
    named = _named(state) if state.key_type == "name" else []
    missing = [name for name in named if name not in names]
    if not missing or any(_FLAT in name for name in (*names, *named)):
        return []
    held = {clean(name) for name in names}
    ends = {end for name in held for end in _ends(name)}
    missing = [name for name in missing if clean(name) not in ends and held.isdisjoint(_ends(clean(name)))]
    if not missing:
        return []
    shown = first_of(missing, _SHOWN)
    if len(missing) < len(named):
        keys = "1 optimizer key is" if len(missing) == 1 else f"{len(missing)} optimizer keys are"
        return [Note("unmatched", f"{keys} none of the model's: {shown}", keys=tuple(missing))]
    raise NeedsInformationError(
        f"{source} holds a model and an optimizer that have no parameter name in common",
        details=[f"{where}: {first_of(list(names), _SHOWN)}", f"{other}: {shown}"],
        why="they are of different models, or a tool renamed the parameters of one of them (torchtune saves weights "
        "under Hugging Face's names, and its optimizer under its own)",
        next_step=f"name the one to read, for example {shlex.quote(where)}",
        file=source,
    )


def _named(optim: OptimState) -> list[str]:
    """The parameters' names among the optimizer's keys, each once."""
    with_state = [key for key, states in optim.state.items() if BARE_VALUE not in states]
    listed = optim.grouped_keys()
    return list(dict.fromkeys(key for key in (*with_state, *listed) if isinstance(key, str)))


def _ends(name: str) -> list[str]:
    """``a.b.c``: itself, ``b.c`` and ``c``."""
    words = name.split(".")
    return [".".join(words[at:]) for at in range(len(words))]
