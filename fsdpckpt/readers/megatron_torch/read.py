"""Joins the files that the ranks of Megatron-LM saved: whole parameters of all pipeline stages and experts, the float32
weights and states of the optimizer by name, and extras.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import cast

from fsdpckpt.errors import SourceCorruptError, SourceUnsupportedError, damaged
from fsdpckpt.formats.torch import notes_on_dropped, read_archive
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.checkpoint import Checksums, Evidence, EvidenceKind, Problem
from fsdpckpt.ir.values import Key, Object, Value, equal
from fsdpckpt.readers.megatron_torch.distributed import read_distributed
from fsdpckpt.readers.megatron_torch.layout import LAYOUT_ARGUMENTS, LayoutError, RunArguments, shards_of
from fsdpckpt.readers.megatron_torch.names import WORDS, StateDict, in_order, is_buffer, is_of_expert, names_of
from fsdpckpt.readers.megatron_torch.optimizer import (
    OPTIMIZER,
    RankOptimizer,
    names_of_groups,
    rank_optimizer,
    unlisted_states,
)
from fsdpckpt.readers.megatron_torch.places import BUFFERS_FILE, Grid, RankPlace
from fsdpckpt.readers.megatron_torch.problems import (
    COPY_AGAIN,
    MAX_SHOWN,
    mapping,
    no_states,
    not_split_like_weight,
    unknown_order,
)
from fsdpckpt.readers.megatron_torch.rank_model import FORMAT, MODEL, ModelInFile, WholeModel
from fsdpckpt.readers.missing_ranks import ranks_missing
from fsdpckpt.readers.model_shards import ModelShard, RankGrid, Shards, whole_shard
from fsdpckpt.readers.optimizer_forms import notes_on_copies
from fsdpckpt.readers.protocol import FileTable, PartContents
from fsdpckpt.readers.recorded_parts import TO_TORCH_DIST
from fsdpckpt.readers.torch_ranks.merge import merge_distributed
from fsdpckpt.readers.torch_ranks.rank_files import RankFile
from fsdpckpt.readers.torch_ranks.read import separate_extras
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import is_or_are, plural, shape_text, some_of

_ARGUMENTS = "args"
_CHUNK = re.compile(r"^model(\d{1,3})$")
_ITERATION = "iteration"
_EXTRA_STATE = "_extra_state"
_MIXED = "files of two saves are mixed, or the copy is not complete"

Numbers = tuple[int, ...]
"""Those in the name of a rank's directory."""


def read_megatron(directory: str, paths: Mapping[Numbers, str], table: FileTable, sources: Sources) -> PartContents:
    """Read the iteration in ``directory``. ``paths``: the file of each rank.

    Raises SourceIncompleteError for ranks without a file, SourceUnsupportedError that lists the parameters of which
    nothing says how they are cut, SourceCorruptError for files that contradict each other.
    """
    files = []
    missing = [path for path in paths.values() if sources.stat(path) is None]
    present = {numbers: path for numbers, path in sorted(paths.items()) if path not in missing}
    for rank, path in enumerate(present.values()):
        source = sources.open(path)
        number = table.add(path, source.nbytes)
        files.append(RankFile(rank, number, read_archive(source, number)))
    return _Iteration(directory, dict(zip(present, files, strict=True)), missing, table, sources).tree()


@dataclass
class _Iteration:
    """One iteration while it is read. ``found``: the files by the numbers of their directories; ``missing``: those of
    directories without one.
    """

    directory: str
    found: Mapping[Numbers, RankFile]
    missing: Sequence[str]
    table: FileTable
    sources: Sources

    def tree(self) -> PartContents:
        self._require_one_save()
        grid, places = self._grid()
        self._require_own_places(grid, places)
        whole = self._model(grid, places)
        optimizers = [rank_optimizer(self._root(file).get(OPTIMIZER)) for file in self.files]
        # The distributed optimizer has its states in files of their own, any other one in those of the model.
        buffers = self._buffers() if any(optimizer is None for optimizer in optimizers) else []
        saved = self._root(self.files[0]).get(OPTIMIZER)
        distributed = read_distributed(whole, buffers, saved, self.table, self.sources) if buffers else None
        members = None if buffers else self._members(optimizers, whole)
        problems = [found for found in (distributed, members) if isinstance(found, Problem)]
        distributed = None if isinstance(distributed, Problem) else distributed
        members = None if isinstance(members, Problem) else members
        roots = []
        for own, optimizer in zip(whole.files, optimizers, strict=True):
            roots.append(self._rewritten(own, whole.shards, optimizer, members))
        tree = merge_distributed(self.files, roots, FORMAT)
        tree.flavor = FORMAT
        tree.problems += problems
        tree.checksums = Checksums.joined([file.archive.checksums for file in self.files])
        root = cast("dict[Key, Value]", tree.root)
        model = cast("dict[Key, Value]", root[MODEL])
        if distributed is not None:
            found = cast("dict[Key, Value]", distributed.root)
            model.update(cast("dict[Key, Value]", found[MODEL]))
            root[OPTIMIZER] = found[OPTIMIZER]
            tree.problems += [*distributed.problems, *distributed.missing.values()]
            archives = [file.archive for file in buffers if file is not None]
            tree.checksums = Checksums.joined([tree.checksums, *(archive.checksums for archive in archives)])
        in_model: dict[Key, Value] = {name: model[name] for name in whole.order if name in model}
        root[MODEL] = {**in_model, **model}
        separate_extras(tree, self.table, self.sources)
        tree.notes += notes_on_dropped([file.archive for file in self.files])
        mastered = set() if members is None else {name for names in members.groups for name in names}
        if distributed is not None:
            mastered.update(map(str, cast("dict[Key, Value]", cast("dict[Key, Value]", distributed.root)[MODEL])))
        tree.copies = whole.copies(mastered)
        tree.notes += notes_on_copies({copy.dtype.name for copy in tree.copies.values()} - {"float32"})
        message = f"{self.directory} is Megatron-LM's torch format of {grid.described()}"
        tree.evidence.append(Evidence(EvidenceKind.CONTAINER, message))
        return tree

    # The files and their places

    @cached_property
    def files(self) -> list[RankFile]:
        return list(self.found.values())

    @cached_property
    def arguments(self) -> list[RunArguments]:
        return [self._arguments(file) for file in self.files]

    def _root(self, file: RankFile) -> StateDict:
        return mapping(file.archive.root, file, "its content")

    def _arguments(self, file: RankFile) -> RunArguments:
        found = self._root(file).get(_ARGUMENTS)
        state = found.state if isinstance(found, Object) else found
        return RunArguments({str(key): value for key, value in mapping(state, file, _ARGUMENTS).items()})

    def _grid(self) -> tuple[Grid, dict[RankPlace, RankFile]]:
        """The ranks of the run, and the file of each. Raises unless each has one."""
        try:
            grid = Grid.of(self.arguments[0])
        except LayoutError as error:
            raise self._refused(f"{self.directory}: cannot tell which ranks it needs", [str(error)]) from None
        places = {grid.place(numbers): file for numbers, file in self.found.items()}
        if None in places:
            raise SourceCorruptError(
                f"{self.directory} has {self._counted()}",
                file=places[None].archive.path,
                expected=f"those of {grid.described()}, as args say",
                found=some_of([file.archive.path.split("/")[-2] for file in self.files], MAX_SHOWN),
                why=_MIXED,
                next_step=COPY_AGAIN,
            )
        of_places = {place: file for place, file in places.items() if place is not None}
        missing = [f"{self.directory}/{grid.directory(each)}" for each in grid.places() if each not in of_places]
        if missing:
            files = [f"{each}/model_optim_rng.pt" for each in missing]
            what = f"{self.directory}: the files of {plural(len(missing), grid.kind)} are missing"
            raise ranks_missing(what, missing, most_shown=MAX_SHOWN, files=files, file=files[0])
        return grid, of_places

    def _counted(self) -> str:
        kind = "tensor-parallel rank" if all(len(numbers) == 1 for numbers in self.found) else "rank"
        return f"files of {plural(len(self.found) + len(self.missing), kind)}"

    def _require_one_save(self) -> None:
        """Raises SourceCorruptError unless all ranks saved at one iteration, with the same sizes."""
        for file, each in zip(self.files, self.arguments, strict=True):
            facts = [(_ITERATION, self._root(self.files[0]).get(_ITERATION), self._root(file).get(_ITERATION))]
            facts += [
                (f"{_ARGUMENTS}.{name}", self.arguments[0].values.get(name), each.values.get(name))
                for name in LAYOUT_ARGUMENTS
            ]
            for name, first, own in facts:
                if not equal(cast(Value, first), cast(Value, own)):
                    raise damaged(
                        file.archive.path,
                        f"its {name} is not that of the first rank",
                        repr(first)[:40],
                        repr(own)[:40],
                        why=_MIXED,
                        next_step=COPY_AGAIN,
                    )

    def _require_own_places(self, grid: Grid, places: Mapping[RankPlace, RankFile]) -> None:
        """Raises SourceCorruptError for files in each other's directories, which shards of equal shapes do not show.

        ``args.rank`` is that of the process that saved. One process that saves for all of them, as in Megatron's own
        converter, has the same in each.
        """
        place_of = {file.archive.path: place for place, file in places.items()}
        saved = {
            file.archive.path: (rank, grid.place_of_rank(rank, arguments))
            for file, arguments in zip(self.files, self.arguments, strict=True)
            if type(rank := arguments.values.get("rank")) is int
        }
        own = [place for _, place in saved.values()]
        if len({rank for rank, _ in saved.values()}) <= 1 or None in own:
            return
        wrong = [path for path, (_, place) in saved.items() if place != place_of[path]]
        if not wrong:
            return
        copied = len(set(own)) < len(own)
        raise SourceCorruptError(
            f"{self.directory}: files of {grid.kind}s are in each other's directories",
            details=[f"{path}: saved by rank {saved[path][0]}" for path in (saved if not copied else wrong)],
            file=wrong[0],
            why="directories were renamed, or copied from another rank",
            next_step="copy these directories again"
            if copied
            else "rename every directory to the rank that saved its file (args.rank), as listed above",
        )

    def _refused(self, what: str, details: Sequence[str]) -> SourceUnsupportedError:
        return SourceUnsupportedError(
            what,
            details=details,
            most_shown=MAX_SHOWN,
            file=self.files[0].archive.path,
            why="each file contains plain tensors; how to join them is defined in the model's code, not in the files",
            next_step=TO_TORCH_DIST,
        )

    # The model

    def _chunks(self, file: RankFile) -> list[StateDict]:
        """The chunks of the model that a rank has: one, or several of an interleaved pipeline."""
        root = self._root(file)
        numbers = sorted(int(match[1]) for key in root if (match := _CHUNK.match(str(key))))
        expected = self.arguments[0].values.get("virtual_pipeline_model_parallel_size") or 1
        if len(numbers or [0]) != expected or (numbers and numbers != list(range(len(numbers)))):
            chunks = "model" if not numbers else ", ".join(f"model{number}" for number in numbers)
            raise damaged(
                file.archive.path,
                "it does not have all chunks of its pipeline stage",
                f"args.virtual_pipeline_model_parallel_size={expected} of them",
                chunks[:80],
                why=_MIXED,
                next_step=COPY_AGAIN,
            )
        keys = [f"{MODEL}{number}" for number in numbers] or [MODEL]
        return [mapping(root.get(key), file, key) for key in keys]

    def _model(self, grid: Grid, places: Mapping[RankPlace, RankFile]) -> WholeModel:
        """The model, and what each file has of it."""
        place_of = {file.archive.path: place for place, file in places.items()}
        chunks = {place: self._chunks(file) for place, file in places.items()}
        try:
            names = names_of(chunks, grid, self.arguments[0])
        except LayoutError as error:
            raise self._refused(f"{self.directory}: its files are not all parts of one model", [str(error)]) from None
        held = []
        for file in self.files:
            own = ModelInFile(file, place_of[file.archive.path])
            for number, state in enumerate(chunks[own.place]):
                own.chunks.append({})
                for key, leaf in state.items():
                    name = names.of(str(key), (number, own.place.stage), own.place)
                    if isinstance(leaf, StoredTensor) and name.rpartition(".")[2] != _EXTRA_STATE:
                        own.weights[name] = leaf
                        own.chunks[-1].update({} if is_buffer(name) else {name: leaf})
                    else:
                        own.others[name] = leaf
            held.append(own)
        _share_others(held)
        return WholeModel(self.directory, held, in_order(chunks, names), self._shards(grid, held))

    def _shards(self, grid: Grid, held: Sequence[ModelInFile]) -> dict[str, Shards]:
        """What each file has of every parameter."""
        holders: dict[str, list[ModelInFile]] = {}
        unknown: list[str] = []
        for own in held:
            for name in own.weights:
                holders.setdefault(name, []).append(own)
            unknown += [
                f"{name!s}: it is not a tensor on every rank"
                for name in own.others
                if str(name).rpartition(".")[2] != _EXTRA_STATE
            ]
        shards: dict[str, Shards] = {}
        for name, of_name in holders.items():
            try:
                shards[name] = self._shards_of(name, grid, of_name, held)
            except LayoutError as error:
                unknown.append(f"{name}: {error}")
        if unknown:
            what = f"{self.directory}: cannot tell how {plural(len(unknown), 'parameter')} of {len(held)} "
            raise self._refused(f"{what}{grid.kind}s {is_or_are(len(unknown))} split", unknown)
        return shards

    def _shards_of(self, name: str, grid: Grid, holders: Sequence[ModelInFile], held: Sequence[ModelInFile]) -> Shards:
        """The shards of one parameter. Raises LayoutError."""
        of_expert = is_of_expert(name)
        shapes = {own.weights[name].shape for own in holders}
        if len(shapes) > 1:
            raise LayoutError(f"its shards have the shapes {', '.join(map(shape_text, sorted(shapes)))}")
        stages, experts = {own.place.stage for own in holders}, {own.place.expert for own in holders}
        # Who is on the same stages has it too; an expert only who has the same experts.
        peers = [own for own in held if own.place.stage in stages]
        if of_expert:
            peers = [own for own in peers if own.place.expert in experts]
        absent = next((own for own in peers if name not in own.weights), None)
        if absent is not None:
            raise LayoutError(f"{absent.file.archive.path} has no such entry")
        if len(stages) > 1 and name != WORDS:
            raise LayoutError("several pipeline stages have it")
        (shape,) = shapes
        ranks = grid.parts(of_expert=of_expert)
        if ranks == 1:
            return Shards(shape, {own.file.rank: ModelShard.of_whole(shape) for own in holders})
        parts = shards_of(name, shape, ranks, self.arguments[0])
        by_rank: dict[int, ModelShard] = {
            own.file.rank: parts.by_rank[grid.part(own.place, of_expert=of_expert)] for own in holders
        }
        return Shards(parts.shape, by_rank)

    # The optimizer

    def _members(self, optimizers: Sequence[RankOptimizer | None], model: WholeModel) -> _Members | Problem | None:
        """The parameters of each param group, which the values prove on every rank; a fatal problem of the optimizer if
        they do not. None without an optimizer.
        """
        if all(OPTIMIZER not in self._root(file) for file in self.files):
            return None
        by_file: list[list[list[str]]] = []
        for own, optimizer in zip(model.files, optimizers, strict=True):
            if optimizer is None:
                return no_states(own.file)
            unlisted = unlisted_states(optimizer)
            if unlisted:
                raise damaged(
                    own.file.archive.path,
                    "its optimizer has states of parameters that no param group lists",
                    "states of the ids in param_groups",
                    f"also those of {some_of(unlisted, MAX_SHOWN)}",
                    why=_MIXED,
                    next_step=COPY_AGAIN,
                )
            copies = {name: weight for name, weight in own.weights.items() if not is_buffer(name)}
            names = names_of_groups(own.file, optimizer, copies, self.table.files(), self.sources)
            if names is None:
                return unknown_order(own.file, mastered=any(group.masters for group in optimizer.groups))
            by_file.append(names)
        # All files have the same groups, and a parameter is in the same group in each file that has it.
        group_of: dict[str, int] = {}
        for own, names in zip(model.files, by_file, strict=True):
            if len(names) != len(by_file[0]):
                return unknown_order(own.file)
            for number, of_group in enumerate(names):
                if any(group_of.setdefault(name, number) != number for name in of_group):
                    return unknown_order(own.file)
        groups: list[list[str]] = [[] for _ in by_file[0]]
        for name in model.order:
            if name in group_of:
                groups[group_of[name]].append(name)
        # A group without parameters on a stage is there for the others' sake, and its step may not be counted.
        settings: list[StateDict] = []
        for of_files in zip(*(own.groups for own in optimizers if own is not None), strict=True):
            with_parameters = [group for group in of_files if group.ids]
            settings.append((with_parameters or of_files)[0].settings)
        return _Members(
            {own.file.rank: names for own, names in zip(model.files, by_file, strict=True)}, groups, settings
        )

    def _buffers(self) -> list[RankFile | None]:
        """The file of each rank's distributed optimizer, None for a rank without one; [] if no rank has one."""
        found: list[RankFile | None] = []
        for file in self.files:
            path = f"{file.archive.path.rpartition('/')[0]}/{BUFFERS_FILE}"
            if self.sources.stat(path) is None:
                found.append(None)
                continue
            source = self.sources.open(path)
            number = self.table.add(path, source.nbytes)
            found.append(RankFile(file.rank, number, read_archive(source, number)))
        return found if any(found) else []

    # The ranks' files, rewritten

    def _rewritten(
        self, own: ModelInFile, shards: Mapping[str, Shards], optimizer: RankOptimizer | None, members: _Members | None
    ) -> StateDict:
        """One rank's file with its shards as parts of whole parameters."""
        grid, file = RankGrid(1, len(self.files)), own.file

        def part(name: str, leaf: object) -> object:
            return whole_shard(grid, file.rank, file.rank, shards[name], cast(StoredTensor, leaf))

        weights: StateDict = {name: part(name, leaf) for name, leaf in own.weights.items()}
        weights.update(own.others)
        root: StateDict = {
            key: value
            for key, value in self._root(file).items()
            if key not in (MODEL, OPTIMIZER) and not _CHUNK.match(str(key))
        }
        root[MODEL] = weights
        if optimizer is None or members is None:
            return root
        states: StateDict = {}
        groups: list[StateDict] = []
        listed = zip(optimizer.groups, members.by_file[file.rank], members.groups, members.settings, strict=True)
        for group, names, everywhere, settings in listed:
            for number, master, name in zip(group.ids, group.masters, names, strict=True):
                weights[name] = part(name, master)
                entry = mapping(group.state.get(cast(Key, number), {}), file, f"the state of {name}")
                shape = shards[name].by_rank[file.rank].shape
                for state, leaf in entry.items():
                    if isinstance(leaf, StoredTensor) and prod(leaf.shape) != 1 and leaf.shape != shape:
                        raise not_split_like_weight(file, name, str(state), leaf, shape)
                states[name] = {
                    state: part(name, leaf) if isinstance(leaf, StoredTensor) and leaf.shape == shape else leaf
                    for state, leaf in entry.items()
                }
            own_settings = group.settings if group.ids else settings
            groups.append({**own_settings, "params": list(everywhere)})
        root[OPTIMIZER] = {"state": states, "param_groups": groups}
        root.update({key: value for key, value in optimizer.others.items() if key not in root})
        return root


def _share_others(held: Sequence[ModelInFile]) -> None:
    """Give every file what is no tensor of other stages and experts, as if each rank had the whole model."""
    holders: dict[Key, list[ModelInFile]] = {}
    for own in held:
        for name in own.others:
            holders.setdefault(name, []).append(own)
    for name, having in holders.items():
        of_expert = is_of_expert(str(name))
        places = {(each.place.stage, each.place.expert if of_expert else 0) for each in having}
        for own in held:
            if (own.place.stage, own.place.expert if of_expert else 0) not in places:
                own.others[name] = having[0].others[name]


@dataclass(frozen=True, slots=True)
class _Members:
    """The parameters of each param group: those of each file, and all. ``settings``: of each group, from a rank that
    has parameters in it.
    """

    by_file: Mapping[int, list[list[str]]]
    groups: list[list[str]]
    settings: list[StateDict]
