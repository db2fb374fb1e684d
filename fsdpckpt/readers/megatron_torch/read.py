"""Joins the files that tensor-parallel ranks of Megatron-LM saved: whole parameters, the float32 weights and states of
the optimizer by name, and extras.

``Float16OptimizerWithFloat16Params`` has the float32 weights of each param group in ``fp32_from_fp16_params``, in the
order of the ids (``megatron/core/optimizer/optimizer.py``). Nothing says which parameter each of them is: they round to
the model's copies, on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

from fsdpckpt import flags
from fsdpckpt.errors import SourceCorruptError, SourceIncompleteError, SourceUnsupportedError, damaged
from fsdpckpt.formats.torch import local_tensor, notes_on_dropped, read_archive
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.checkpoint import Checksums, Evidence, EvidenceKind, Problem, Section
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Object, Value, equal
from fsdpckpt.readers.megatron_torch.layout import LAYOUT_ARGUMENTS, Arguments, LayoutError, shards_of
from fsdpckpt.readers.missing_ranks import ranks_missing
from fsdpckpt.readers.model_shards import RankGrid, Shards, whole_shard
from fsdpckpt.readers.optimizer_forms import notes_on_copies
from fsdpckpt.readers.protocol import FileTable, PartContents
from fsdpckpt.readers.same_weights import first_different, names_by_value
from fsdpckpt.readers.torch_ranks.merge import merge_distributed
from fsdpckpt.readers.torch_ranks.rank_files import RankFile
from fsdpckpt.readers.torch_ranks.read import separate_extras
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import plural, shape_text

_FORMAT = "megatron-torch"
_MODEL, _OPTIMIZER, _ARGUMENTS = "model", "optimizer", "args"
_MASTERS = "fp32_from_fp16_params"
_ITERATION = "iteration"
_SIZES = {"pipeline_model_parallel_size": "pipeline stages", "expert_model_parallel_size": "experts"}
_EXTRA_STATE = "_extra_state"
_MAX_SHOWN = 6
_MIXED = "files of two saves are mixed, or the copy is not complete"

StateDict = dict[Key, object]


def read_megatron(directory: str, paths: Mapping[int, str], table: FileTable, sources: Sources) -> PartContents:
    """Read the iteration in ``directory``. ``paths``: the file of each tensor-parallel rank.

    Raises SourceIncompleteError for ranks without a file, SourceUnsupportedError that lists the parameters of which
    nothing says how they are cut, SourceCorruptError for files that contradict each other.
    """
    missing = [path for path in paths.values() if sources.stat(path) is None]
    count = max(paths) + 1
    missing += [f"{directory}/mp_rank_{rank:02}/model_optim_rng.pt" for rank in range(count) if rank not in paths]
    if missing:
        raise _incomplete(directory, missing)
    files = []
    for rank, path in sorted(paths.items()):
        source = sources.open(path)
        number = table.add(path, source.nbytes)
        files.append(RankFile(rank, number, read_archive(source, number)))
    return _Iteration(directory, files, table, sources).tree()


def _incomplete(directory: str, missing: Sequence[str]) -> SourceIncompleteError:
    what = f"{directory}: the files of {plural(len(missing), 'tensor-parallel rank')} are missing"
    return ranks_missing(what, missing, most_shown=_MAX_SHOWN, files=missing, file=missing[0])


@dataclass(frozen=True, slots=True)
class _RankOptimizer:
    """One rank's optimizer. ``ids``: of each param group; ``masters``: the float32 weights, in the same order."""

    groups: list[StateDict]
    state: Mapping[Key, object]
    ids: list[list[object]]
    masters: list[list[StoredTensor]]
    others: StateDict


@dataclass(slots=True)
class _Iteration:
    """One iteration while it is read. ``files``: by tensor-parallel rank."""

    directory: str
    files: list[RankFile]
    table: FileTable
    sources: Sources

    def tree(self) -> PartContents:
        arguments = [self._arguments(file) for file in self.files]
        self._require_all(arguments)
        models = [_mapping(self._root(file).get(_MODEL), file, _MODEL) for file in self.files]
        parameters = self._shards(models, arguments)
        problems: list[Problem] = []
        optimizers = [self._optimizer(file) for file in self.files]
        names = self._names(optimizers, models, parameters, problems)
        roots = [
            self._named(file, model, optimizer if names is not None else None, names or [], parameters)
            for file, model, optimizer in zip(self.files, models, optimizers, strict=True)
        ]
        tree = merge_distributed(self.files, roots, _FORMAT)
        tree.flavor = _FORMAT
        tree.problems += problems
        tree.checksums = Checksums.joined([file.archive.checksums for file in self.files])
        separate_extras(tree, self.table, self.sources)
        tree.notes += notes_on_dropped([file.archive for file in self.files])
        if names is not None:
            copies = {leaf.dtype.name for leaf in models[0].values() if isinstance(leaf, StoredTensor)}
            tree.notes += notes_on_copies(copies - {"float32"}) if optimizers[0].masters else []  # type: ignore[union-attr]
        message = f"{self.directory} is Megatron-LM's torch format of {plural(len(self.files), 'tensor-parallel rank')}"
        tree.evidence.append(Evidence(EvidenceKind.CONTAINER, message))
        return tree

    # The content of the files

    def _root(self, file: RankFile) -> StateDict:
        return _mapping(file.archive.root, file, "its content")

    def _arguments(self, file: RankFile) -> Arguments:
        found = self._root(file).get(_ARGUMENTS)
        state = found.state if isinstance(found, Object) else found
        return Arguments({str(key): value for key, value in _mapping(state, file, _ARGUMENTS).items()})

    def _require_all(self, arguments: Sequence[Arguments]) -> None:
        """Raises unless these are all ranks of a model that is parallel in no other way."""
        first = self.files[0].archive.path
        sizes = {each.values.get("tensor_model_parallel_size") for each in arguments}
        size = next(iter(sizes))
        if len(sizes) == 1 and type(size) is int and len(self.files) < size < 1 << 16:
            paths = [f"{self.directory}/mp_rank_{rank:02}" for rank in range(len(self.files), size)]
            raise _incomplete(self.directory, paths)
        if sizes != {len(self.files)}:
            raise SourceCorruptError(
                f"{self.directory} has files of {plural(len(self.files), 'tensor-parallel rank')}",
                file=first,
                expected=f"args.tensor_model_parallel_size={len(self.files)} in each",
                found=", ".join(sorted(repr(each)[:40] for each in sizes)),
                why=_MIXED,
                next_step="copy the checkpoint again",
            )
        self._require_one_save(arguments)
        self._require_own_places(arguments)
        for name, kind in _SIZES.items():
            found = arguments[0].values.get(name, 1)
            if found not in (1, None):
                raise self._refused(f"{self.directory} has files of {kind}", [f"its arguments say {name}={found!r}"])

    def _require_one_save(self, arguments: Sequence[Arguments]) -> None:
        """Raises SourceCorruptError unless all ranks saved at one iteration, with the same sizes."""
        for file, each in zip(self.files, arguments, strict=True):
            facts = [(_ITERATION, self._root(self.files[0]).get(_ITERATION), self._root(file).get(_ITERATION))]
            facts += [
                (f"{_ARGUMENTS}.{name}", arguments[0].values.get(name), each.values.get(name))
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
                        next_step="copy the checkpoint again",
                    )

    def _require_own_places(self, arguments: Sequence[Arguments]) -> None:
        """Raises SourceCorruptError for files in each other's directories, which shards of equal shapes do not show.

        ``args.rank`` is that of the process that saved: tensor-parallel ranks follow each other. One process that saves
        for all of them, as in Megatron's own converter, has the same in each.
        """
        ranks = [each.values.get("rank") for each in arguments]
        count = len(ranks)
        places = [rank % count for rank in ranks if type(rank) is int]
        if sorted(places) != list(range(count)) or places == list(range(count)):
            return
        raise SourceCorruptError(
            f"{self.directory}: files of tensor-parallel ranks are in each other's directories",
            details=[
                f"{file.archive.path}: saved by rank {rank}" for file, rank in zip(self.files, ranks, strict=True)
            ],
            file=next(file.archive.path for file, place in zip(self.files, places, strict=True) if file.rank != place),
            why="directories were renamed, or copied from another rank",
            next_step="rename every directory to the rank that saved its file (args.rank), as listed above",
        )

    def _refused(self, what: str, details: Sequence[str]) -> SourceUnsupportedError:
        return SourceUnsupportedError(
            what,
            details=details,
            most_shown=_MAX_SHOWN,
            file=self.files[0].archive.path,
            why="each file contains plain tensors; how to join them is defined in the model's code, not in the files",
            next_step="load it with Megatron-LM as it was saved, and save it with --ckpt-format torch_dist",
        )

    def _shards(self, models: Sequence[StateDict], arguments: Sequence[Arguments]) -> dict[str, Shards]:
        shards: dict[str, Shards] = {}
        unknown: list[str] = []
        for key, leaf in models[0].items():
            name = str(key)
            if name.rpartition(".")[2] == _EXTRA_STATE:
                continue
            others = [model.get(key) for model in models]
            if not all(isinstance(other, StoredTensor) for other in others):
                unknown.append(f"{name}: it is not a tensor on every rank")
                continue
            shapes = {cast(StoredTensor, other).shape for other in others}
            if len(shapes) > 1:
                unknown.append(f"{name}: its shards have the shapes {', '.join(map(shape_text, sorted(shapes)))}")
                continue
            try:
                shards[name] = shards_of(name, cast(StoredTensor, leaf).shape, len(models), arguments[0])
            except LayoutError as error:
                unknown.append(f"{name}: {error}")
        unknown += [
            f"{name!s}: rank 0 has no such entry" for model in models for name in model if name not in models[0]
        ]
        if unknown:
            what = f"{self.directory}: cannot tell how {plural(len(unknown), 'parameter')} of {len(models)} "
            raise self._refused(f"{what}tensor-parallel ranks {'is' if len(unknown) == 1 else 'are'} split", unknown)
        return shards

    # The optimizer

    def _optimizer(self, file: RankFile) -> _RankOptimizer | None:
        """None without an optimizer, or without its states."""
        saved = self._root(file).get(_OPTIMIZER)
        if not isinstance(saved, dict):
            return None
        inner = saved.get(_OPTIMIZER, saved)
        state, groups = (inner.get(key) if isinstance(inner, dict) else None for key in ("state", "param_groups"))
        if not isinstance(state, dict) or not isinstance(groups, list):
            return None
        param_groups = [_mapping(group, file, "param_groups") for group in groups]
        listed = [group.get("params") for group in param_groups]
        ids = [list(each) if isinstance(each, (list, tuple)) else [] for each in listed]
        masters = saved.get(_MASTERS) if inner is not saved else None
        by_group: list[list[StoredTensor]] = []
        for of_group in masters if isinstance(masters, (list, tuple)) else ():
            tensors = list(of_group) if isinstance(of_group, (list, tuple)) else [None]
            if not all(isinstance(tensor, StoredTensor) for tensor in tensors):
                return None
            by_group.append(cast("list[StoredTensor]", tensors))
        others = {key: value for key, value in saved.items() if key not in (_OPTIMIZER, _MASTERS)}
        return _RankOptimizer(param_groups, state, ids, by_group, others if inner is not saved else {})

    def _names(
        self,
        optimizers: Sequence[_RankOptimizer | None],
        models: Sequence[StateDict],
        parameters: Mapping[str, Shards],
        problems: list[Problem],
    ) -> list[list[str]] | None:
        """The parameters of each param group, which the values prove on every rank. None, with a fatal problem of the
        optimizer, if they do not.
        """
        if all(_OPTIMIZER not in self._root(file) for file in self.files):
            return None
        proved: list[list[str]] | None = None
        for file, optimizer, model in zip(self.files, optimizers, models, strict=True):
            if optimizer is None:
                problems.append(self._no_states(file))
                return None
            names = self._names_on(file, optimizer, model, parameters)
            if names is None or (proved is not None and names != proved):
                message = (
                    f"cannot tell which parameter each optimizer state in {file.archive.path} belongs to: its float32 "
                    f"weights ({_MASTERS}) do not tell them apart. Save it with --ckpt-format torch_dist"
                )
                problems.append(Problem("parameter-order", message, file=file.archive.path, section=Section.OPTIM))
                return None
            proved = names
        return proved

    def _no_states(self, file: RankFile) -> Problem:
        message = (
            f"the optimizer in {file.archive.path} has no states: the distributed optimizer keeps them as Megatron's "
            "buffers (distrib_optim.pt), and only the model's code says which elements belong to which parameter: save "
            "with --ckpt-format torch_dist and --dist-ckpt-optim-fully-reshardable"
        )
        return Problem("flattened", message, file=file.archive.path, section=Section.OPTIM)

    def _names_on(
        self, file: RankFile, optimizer: _RankOptimizer, model: StateDict, parameters: Mapping[str, Shards]
    ) -> list[list[str]] | None:
        masters = [master for group in optimizer.masters for master in group]
        counts = [len(group) for group in optimizer.masters]
        if not masters or counts != [len(ids) for ids in optimizer.ids]:
            return None
        held = [local_tensor(master, file.file, file.rank) for master in masters]
        copies = {name: local_tensor(cast(StoredTensor, model[name]), file.file, file.rank) for name in parameters}
        names = self._in_order(copies, held, counts) or names_by_value(copies, held, self.table.files(), self.sources)
        if names is None:
            return None
        ends = [sum(counts[: at + 1]) for at in range(len(counts))]
        return [names[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def _in_order(
        self, copies: Mapping[str, Tensor], masters: Sequence[Tensor], counts: Sequence[int]
    ) -> list[str] | None:
        """All parameters in Megatron's order (``_get_param_groups``: matrices before vectors and biases, in each group
        in the order of the model); None unless each master rounds to the copy in its place.
        """
        matrices = [name for name, copy in copies.items() if copy.ndim > 1]
        vectors = [name for name, copy in copies.items() if copy.ndim <= 1]
        orders = [list(copies)] if len(counts) == 1 else [matrices + vectors, vectors + matrices]
        for names in orders:
            pairs = [(name, copies[name], master) for name, master in zip(names, masters, strict=False)]
            fit = len(pairs) == len(masters) == len(names)
            if fit and first_different(pairs, self.table.files(), self.sources) is None:
                return names
        return None

    # The ranks' files, rewritten

    def _named(
        self,
        file: RankFile,
        model: StateDict,
        optimizer: _RankOptimizer | None,
        names: Sequence[Sequence[str]],
        parameters: Mapping[str, Shards],
    ) -> StateDict:
        """One rank's file with its shards as parts of whole parameters."""
        grid = RankGrid(1, len(self.files))

        def part(name: str, leaf: object) -> object:
            return whole_shard(grid, file.rank, file.rank, parameters[name], cast(StoredTensor, leaf))

        weights = {key: part(str(key), leaf) if str(key) in parameters else leaf for key, leaf in model.items()}
        root: StateDict = {key: value for key, value in self._root(file).items() if key not in (_MODEL, _OPTIMIZER)}
        root[_MODEL] = weights
        if optimizer is None:
            return root
        states: StateDict = {}
        for ids, masters, members in zip(optimizer.ids, optimizer.masters, names, strict=True):
            for number, master, name in zip(ids, masters, members, strict=True):
                weights[name] = part(name, master)
                entry = _mapping(optimizer.state.get(cast(Key, number), {}), file, f"the state of {name}")
                shape = parameters[name].by_rank[file.rank].shape
                for state, leaf in entry.items():
                    if isinstance(leaf, StoredTensor) and prod(leaf.shape) != 1 and leaf.shape != shape:
                        raise self._uncut(file, name, str(state), leaf, shape)
                states[name] = {
                    state: part(name, leaf) if isinstance(leaf, StoredTensor) and leaf.shape == shape else leaf
                    for state, leaf in entry.items()
                }
        groups = [{**group, "params": list(each)} for group, each in zip(optimizer.groups, names, strict=True)]
        root[_OPTIMIZER] = {"state": states, "param_groups": groups}
        root.update({key: value for key, value in optimizer.others.items() if key not in root})
        return root

    def _uncut(
        self, file: RankFile, name: str, state: str, leaf: StoredTensor, shape: tuple[int, ...]
    ) -> SourceUnsupportedError:
        return SourceUnsupportedError(
            f"{file.archive.path}: the state {state} of {name} is not split like the weight",
            file=file.archive.path,
            key=name,
            rank=file.rank,
            expected=shape_text(shape),
            found=shape_text(leaf.shape),
            why="the optimizer factors or quantizes its states",
            next_step=f"convert the weights alone with {flags.only('model')}",
        )


def _mapping(value: object, file: RankFile, what: str) -> StateDict:
    if not isinstance(value, dict):
        raise damaged(
            file.archive.path,
            f"{what} is {'missing' if value is None else 'no dict'}",
            "a file that Megatron-LM saved",
            f"a {type(value).__name__}",
            why="the file was changed, or a version of Megatron-LM that is not known wrote it",
            next_step="copy the checkpoint again",
        )
    return cast(StateDict, cast("dict[Key, Value]", value))
