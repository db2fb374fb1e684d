"""Recognises nanotron's checkpoints by their ``checkpoint_metadata.json``, and finds the files of all ranks.

``nanotron/serialize`` writes, below the directory of a step, ``model/`` with a safetensors file for each parameter and,
if it is cut, for each rank (``weights.py``, ``utils.py`` ``get_path``); and ``optimizer/`` with a torch file for each
rank that holds states of its own (``optimizer.py``). All counts are in the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from math import prod

from fsdpckpt.errors import SourceIncompleteError, damaged
from fsdpckpt.ir import Section
from fsdpckpt.readers.nanotron.files import ModelRank, StateFile, WeightFile
from fsdpckpt.readers.protocol import Claim, FileTable, Part, PartContents, ReadOptions
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources
from fsdpckpt.text import is_or_are, plural

_METADATA = "checkpoint_metadata.json"
_MODEL, _OPTIMIZER = "model", "optimizer"
_OTHERS = ("lr_scheduler", "random")  # of each rank, as objects of nanotron's classes
_MOST_MISSING = 10_000  # files that are named
_RANK, _RANKS = r"(\d{1,6})", r"of-(\d{1,6})"
_WEIGHT = re.compile(
    rf"(?P<path>.*/)?model_(?P<name>[^/]+?)(?:_pp-rank-{_RANK}-{_RANKS}_tp-rank-{_RANK}-{_RANKS}"
    rf"(?:_exp-rank-{_RANK}-{_RANKS})?)?\.safetensors"
)
_STATE = re.compile(
    rf"optimizer_pp-{_RANK}-{_RANKS}(?:_dp-{_RANK}-{_RANKS})?_tp-{_RANK}-{_RANKS}(?:_exp-{_RANK}-{_RANKS})?\.pt"
)


class NanotronReader:
    """Directories of one step with a ``checkpoint_metadata.json`` and ``model/``."""

    def recognise_file(self, file: Entry, sources: Sources) -> Part | None:
        del file, sources
        return None

    def recognise_directory(
        self, path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources
    ) -> Claim:
        """Raises SourceIncompleteError that lists every missing file of a rank."""
        above = path.rstrip("/")
        model = sources.stat(f"{above}/{_MODEL}")
        if _METADATA not in files or model is None or not model.directory:
            return Claim()
        weights = _weights(above, sources)
        if not weights:
            return Claim()
        states = _states(above, sources) if options.only is not Section.MODEL else []
        claim = Claim(names={_METADATA}, directories={_MODEL, _OPTIMIZER, *_OTHERS})
        claim.parts.append(Part(above, "nanotron", partial(_read, above, weights, states, files[_METADATA])))
        return claim


def _read(
    directory: str, weights: list[WeightFile], states: list[StateFile], metadata: Entry, table: FileTable, s: Sources
) -> PartContents:
    from fsdpckpt.readers.nanotron.read import read_nanotron

    return read_nanotron(directory, weights, states, metadata, table, s)


def _weights(directory: str, sources: Sources) -> list[WeightFile]:
    """The files of the parameters. Raises SourceIncompleteError for tensor-parallel or expert ranks without one."""
    found: list[WeightFile] = []
    missing: list[str] = []
    ranks: dict[str, dict[tuple[int, int], str]] = {}
    sizes: dict[str, tuple[int, int]] = {}
    for below, entry in sources.files_below(f"{directory}/{_MODEL}"):
        match = _WEIGHT.fullmatch(below)
        if match is None:
            continue
        name = (match["path"] or "").replace("/", ".") + match["name"]
        pp, pp_size, tp, tp_size, exp, exp_size = (int(each) if each else None for each in match.groups()[2:])
        _require_counted(entry.path, ((pp, pp_size), (tp, tp_size), (exp, exp_size)))
        if pp is None or tp is None:
            found.append(WeightFile(name, entry.path, None))
            continue
        found.append(WeightFile(name, entry.path, ModelRank(pp, tp, exp)))
        ranks.setdefault(name, {})[tp, exp or 0] = below
        sizes[name] = (tp_size or 1, exp_size or 1)
    for name, files in ranks.items():
        tp_size, exp_size = sizes[name]
        first = next(iter(files.values()))
        absent = (each for each in _places(tp_size, exp_size) if each not in files)
        for tp, exp in islice(absent, _MOST_MISSING - len(missing)):
            changed = re.sub(r"_tp-rank-\d+-", f"_tp-rank-{tp}-", first)
            missing.append(f"{_MODEL}/" + re.sub(r"_exp-rank-\d+-", f"_exp-rank-{exp}-", changed))
    _require_none_missing(directory, missing)
    return found


def _states(directory: str, sources: Sources) -> list[StateFile]:
    """The files of the optimizer. Raises SourceIncompleteError for ranks without one."""
    entry = sources.stat(f"{directory}/{_OPTIMIZER}")
    if entry is None or not entry.directory:
        return []
    found: list[StateFile] = []
    sizes: set[tuple[int, ...]] = set()
    zero = False
    for file in sources.list_directory(entry.path):
        match = _STATE.fullmatch(file.name)
        if match is None:
            continue
        pp, pp_size, dp, dp_size, tp, tp_size, exp, exp_size = (int(each) if each else None for each in match.groups())
        _require_counted(file.path, ((pp, pp_size), (dp, dp_size), (tp, tp_size), (exp, exp_size)))
        zero = zero or dp is not None
        sizes.add((pp_size or 1, dp_size or 1, tp_size or 1, exp_size or 1))
        found.append(StateFile(file.path, ModelRank(pp or 0, tp or 0, exp or 0), dp, dp_size or 1))
    have = {(file.place.pp, file.dp or 0, file.place.tp, file.place.exp or 0) for file in found}
    missing: list[str] = []
    for pp_size, dp_size, tp_size, exp_size in sorted(sizes):
        absent = (each for each in _places(pp_size, dp_size, tp_size, exp_size) if each not in have)
        for pp, dp, tp, exp in islice(absent, _MOST_MISSING - len(missing)):
            of_dp = f"_dp-{dp}-of-{dp_size}" if zero else ""
            missing.append(
                f"{_OPTIMIZER}/optimizer_pp-{pp}-of-{pp_size}{of_dp}_tp-{tp}-of-{tp_size}_exp-{exp}-of-{exp_size}.pt"
            )
    _require_none_missing(directory, missing)
    if len(sizes) > 1:
        raise SourceIncompleteError(
            f"{directory}/{_OPTIMIZER} has files for {len(sizes)} different numbers of ranks",
            details=sorted(file.path for file in found)[:8],
            file=f"{directory}/{_OPTIMIZER}",
            why="files of two saves are in one directory",
            next_step="copy the files of one save into a directory of their own",
        )
    return found


def _places(*sizes: int) -> Iterator[tuple[int, ...]]:
    """Every combination of ranks. One at a time: a name may count more of them than there is memory for."""
    for number in range(prod(sizes)):
        place, rest = [], number
        for size in reversed(sizes):
            rest, rank = divmod(rest, size)
            place.append(rank)
        yield tuple(reversed(place))


def _require_counted(path: str, ranks: Sequence[tuple[int | None, int | None]]) -> None:
    """Raises SourceCorruptError for a rank that is not below the number of ranks beside it in the file's name."""
    for rank, count in ranks:
        if rank is not None and count is not None and rank >= count:
            raise damaged(
                path,
                "its name contradicts itself",
                expected=f"a rank below {count}",
                found=str(rank),
                why="the file was renamed",
            )


def _require_none_missing(directory: str, missing: list[str]) -> None:
    if missing:
        verb = is_or_are(len(missing))
        least = "at least " if len(missing) == _MOST_MISSING else ""
        raise SourceIncompleteError(
            f"{directory}: {least}{plural(len(missing), 'file')} {verb} missing, by the numbers in the other names",
            details=missing,
            files=missing,
            file=f"{directory}/{missing[0]}",
            why="the save or the copy did not finish",
            next_step="copy the missing files into the directory",
        )
