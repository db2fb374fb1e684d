"""Opens the files of one DeepSpeed step and merges them: what is in those of module states, ``module_states`` reads.

Under ZeRO 3 every rank has a file of module states, otherwise only rank 0 (``_common_checkpoint_state`` of
``deepspeed/runtime/engine.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias, cast

from fsdpckpt.errors import SourceCorruptError, damaged
from fsdpckpt.formats.torch import TorchArchive, notes_on_dropped
from fsdpckpt.formats.zip import top_folder
from fsdpckpt.ir.checkpoint import Checksums, Note
from fsdpckpt.ir.values import Key, Object, Value
from fsdpckpt.readers.deepspeed.partitions import is_count
from fsdpckpt.readers.deepspeed.required_files import require_one_save
from fsdpckpt.readers.model_shards import RankGrid
from fsdpckpt.readers.protocol import FileTable, KeyPath, PartContents, file_name
from fsdpckpt.readers.torch_ranks import NamedRank, check_names
from fsdpckpt.readers.torch_ranks.merge import merge_distributed
from fsdpckpt.readers.torch_ranks.rank_files import RankFile, open_ranks
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import count_text, plural, some_of

StateDict: TypeAlias = dict[Key, object]

_RANK = re.compile(r"^((?:bf16_|fp16_)?zero_pp_rank_)(\d{1,5})(_mp_rank_\d{1,5}_(?:optim|model)_states)$")
_MODEL_RANK = re.compile(r"^(?:.*_)?mp_rank_(\d{1,5})_(?:optim|model)_states$", re.DOTALL)
MAX_RANKS = 100_000  # names have five digits
AUTOEP_LAYERS = "ds_autoep_layers"
_MAX_NAMES = 4


def contradiction(path: str, what: str) -> SourceCorruptError:
    """The error for a file that contradicts itself or the other files of its step."""
    return damaged(
        path,
        what,
        "the files of one save of DeepSpeed",
        why="files of different saves or world sizes are mixed, or a version of DeepSpeed that is not known wrote them",
        next_step="give a directory with the files of one save, or report it with the version of DeepSpeed",
    )


def as_mapping(value: object, path: str, what: str) -> StateDict:
    """``value``, which must be a dict. Raises SourceCorruptError."""
    if not isinstance(value, dict):
        raise damaged(
            path,
            f"{what} is not a dict",
            "a file that DeepSpeed's save_checkpoint wrote",
            f"a {type(value).__name__}",
            why="the file was changed, or a version of DeepSpeed that is not known wrote it",
            next_step="save it again, or report it with the version of DeepSpeed",
        )
    return value


def plain_scaler(value: object) -> object:
    """A loss scaler as the dict of its attributes, so that it can be loaded without DeepSpeed."""
    if isinstance(value, Object) and value.function.module.startswith("deepspeed."):
        return value.state if isinstance(value.state, dict) else None
    return value


@dataclass(frozen=True, slots=True, eq=False)
class StepFile(RankFile):
    """One opened file of a step. ``data_rank``, ``model_rank``: the data-parallel and the model-parallel rank that
    wrote it; ``rank``: the number of both, see ``RankGrid``.
    """

    data_rank: int = 0
    model_rank: int = 0

    @property
    def path(self) -> str:
        return self.archive.path

    @property
    def root(self) -> StateDict:
        return as_mapping(self.archive.root, self.path, "its content")

    @property
    def states(self) -> StateDict:
        """The result of ``optimizer.state_dict()``, in an optimizer's file."""
        return as_mapping(self.root.get("optimizer_state_dict"), self.path, "optimizer_state_dict")

    @property
    def of_pipeline(self) -> bool:
        """Whether a pipeline left the module to the files of its layers."""
        return "module" in self.root and self.root["module"] is None

    @property
    def module(self) -> StateDict:
        """The result of ``module.state_dict()``, in a file of module states."""
        return as_mapping(self.root.get("module"), self.path, "module")


def require_same(directory: str, files: Sequence[StepFile], how_saved: Callable[[StepFile], str | None]) -> None:
    """Raises SourceCorruptError that lists ``files`` by save unless all that show ``how_saved`` show the same."""
    require_one_save(directory, {file_name(file.path): how for file in files if (how := how_saved(file)) is not None})


def require_one_run(directory: str, files: Sequence[StepFile]) -> int:
    """The number of ranks that saved ``files``, 0 if none of them records it. Raises what ``require_same`` does if they
    differ in it, or in the step.
    """
    require_same(directory, files, lambda file: _by_ranks(_recorded_ranks(file)))
    require_same(directory, files, _global_step)
    ranks = max(map(_recorded_ranks, files))
    require_same(directory, files, lambda file: "by more ranks" if file.data_rank >= ranks > 0 else _by_ranks(ranks))
    return ranks


def model_ranks_of(module: Sequence[StepFile]) -> int:
    """The number of model-parallel ranks in files of module states, 1 if none of them records it."""
    recorded = [file.root.get("mp_world_size") for file in module]
    return min(max((cast(int, ranks) for ranks in recorded if is_count(ranks)), default=1), MAX_RANKS)


def degrees_of(file: StepFile) -> tuple[int, int] | None:
    """The numbers of pipeline stages and of tensor-parallel ranks in each, in a file of module states; None if it does
    not record them.
    """
    saved = file.root.get("checkpoint_parallel_dimensions")
    degrees = (saved.get("pp_degree"), saved.get("tp_degree")) if isinstance(saved, dict) else (None, None)
    return cast("tuple[int, int]", degrees) if all(map(is_count, degrees)) else None


def _by_ranks(ranks: int) -> str | None:
    return f"by {plural(ranks, 'rank')}" if ranks else None


def _recorded_ranks(file: StepFile) -> int:
    """The number of ranks in the file: that of parts of a flat tensor in an optimizer's, the ranks with an optimizer's
    file in one of module states.
    """
    states = file.root.get("optimizer_state_dict")
    recorded = states.get("partition_count") if isinstance(states, dict) else file.root.get("dp_world_size")
    counts = recorded if isinstance(recorded, (list, tuple)) else [recorded]
    return max(cast("Sequence[int]", counts), default=0) if all(map(is_count, counts)) else 0


def _global_step(file: StepFile) -> str | None:
    step = file.root.get("global_steps")
    return f"at step {count_text(cast(int, step))}" if is_count(step) else None


def _named_rank(stem: str) -> NamedRank | None:
    match = _RANK.match(stem)
    if match is None:
        return None
    return NamedRank(f"{match[1]} {match[3]}", bare=False, world=None, rank=int(match[2]))


def require_own_number(path: str, pattern: re.Pattern[str], sources: Sources) -> None:
    """Raises SourceCorruptError if ``path`` was saved under a name with another number, which nothing else need show.

    ``pattern``: of names without suffix; its first group is the number. A name of another pattern is accepted.
    """
    was = top_folder(sources.open(path))
    saved, named = pattern.match(was), pattern.match(file_name(path).rpartition(".")[0])
    if saved is not None and named is not None and int(saved[1]) != int(named[1]):
        raise contradiction(path, f"it was saved as {was}.pt")


def open_files(paths: Mapping[int, str], table: FileTable, sources: Sources) -> list[StepFile]:
    """The files at ``paths``, by data-parallel rank. Raises what ``check_names`` and ``read_archive`` raise."""
    return open_grid({0: paths}, table, sources)


def open_grid(paths: Mapping[int, Mapping[int, str]], table: FileTable, sources: Sources) -> list[StepFile]:
    """``open_files`` of several model-parallel ranks, one after the other."""
    grid = RankGrid(0, len(paths))
    files: list[StepFile] = []
    for model_rank, by_data_rank in sorted(paths.items()):
        check_names(by_data_rank, sources, _named_rank)
        for path in by_data_rank.values():
            require_own_number(path, _MODEL_RANK, sources)
        for file in open_ranks(by_data_rank, table, sources, alike=False):
            number = grid.number(file.rank, model_rank)
            files.append(StepFile(number, file.file, file.archive, None, file.rank, model_rank))
    return files


def merge_files(files: Sequence[StepFile], roots: Sequence[StateDict]) -> PartContents:
    """Merge ``roots``, the state dicts of the ranks' ``files``."""
    return merge_distributed(files, roots, "deepspeed")


def groups_by_name(groups: Sequence[StateDict], members: Sequence[Iterable[str]], path: str) -> list[StateDict]:
    """``groups``, the param groups in the file ``path``, which refer to flat tensors by number, with the names of
    ``members``, the parameters of each flat tensor. Raises SourceCorruptError unless they list each number once.
    """
    listed = [group.get("params") for group in groups]
    numbers = [list(params) if isinstance(params, (list, tuple)) else [] for params in listed]
    all_numbers = list(chain(*numbers))
    if all_numbers != list(range(len(members))):
        count = plural(len(members), "flat tensor")
        raise contradiction(path, f"its param groups list {some_of(all_numbers, _MAX_NAMES)} for {count}")
    named: list[StateDict] = []
    for group, of_group in zip(groups, numbers, strict=True):
        names = chain.from_iterable(members[number] for number in of_group)
        named.append({**group, "params": list(names)})
    return named


def section_of(tree: PartContents, section: str) -> dict[Key, Value]:
    """One section of merged files, {} if no file has it."""
    root = cast("dict[Key, Value]", tree.root)
    return cast("dict[Key, Value]", root.get(section, {}))


def add_extras(tree: PartContents, merged: Sequence[PartContents]) -> None:
    """Add the extras of ``merged`` files to ``tree``, beside the sections, and the problems found in them.

    If a key is taken, an underscore is appended, and a note says so.
    """
    root = cast("dict[Key, Value]", tree.root)
    taken = {*root, *(key for more in merged for key in section_of(more, "extra"))}
    for more in merged:
        names: dict[Key, Key] = {}
        for key, value in section_of(more, "extra").items():
            name = key
            while name in root or (name != key and name in taken):
                name = f"{name!s}_"
            root[name] = value
            names[key] = name
            if name != key:
                tree.notes.append(Note("renamed", f"the extra {key!s} is called {name!s} here: {key!s} is taken"))
        tree.problems += [*more.problems, *more.missing.values()]

        def place(path: KeyPath, names: dict[Key, Key] = names) -> KeyPath:
            return (names[path[1]], *path[2:]) if path[0] == "extra" else path

        tree.rank_values.update({place(path): values for path, values in more.rank_values.items()})
        tree.absences.update({place(path): ranks for path, ranks in more.absences.items()})


def add_archives(tree: PartContents, archives: Sequence[TorchArchive]) -> None:
    """Add the checksums and notes of the files of ``tree`` to it."""
    tree.checksums = Checksums.joined(archive.checksums for archive in archives)
    tree.notes.extend(notes_on_dropped(archives))
