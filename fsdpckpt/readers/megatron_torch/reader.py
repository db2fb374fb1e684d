"""Recognises the directory of an iteration that several ranks of Megatron-LM saved with ``--ckpt-format torch``:
``iter_0000500/mp_rank_00/model_optim_rng.pt``, ``mp_rank_01``, ..., with the numbers of the pipeline stage and of the
expert-parallel rank behind it if there are several (``get_checkpoint_name`` of ``megatron/training/checkpointing.py``).

One rank's file is whole, and is read like any other torch file, unless the distributed optimizer's is beside it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial

from fsdpckpt.readers.megatron_torch.places import BUFFERS_FILE, DIRECTORY
from fsdpckpt.readers.protocol import Claim, FileTable, Part, PartContents, ReadOptions
from fsdpckpt.storage import Entry
from fsdpckpt.storage.sources import Sources

MODEL_FILE = "model_optim_rng.pt"
_ITERATION = re.compile(r"^(?:iter_\d{7,}|release|\.*)$")


class MegatronTorchReader:
    """Directories of one iteration with ``mp_rank_00``, ``mp_rank_01``, or ``mp_rank_00_000``, ..."""

    def recognise_file(self, file: Entry, sources: Sources) -> Part | None:
        del file, sources
        return None  # one rank's is a torch file

    def recognise_directory(
        self, path: str, files: Mapping[str, Entry], options: ReadOptions, sources: Sources
    ) -> Claim:
        del files, options
        above = path.rstrip("/")
        if _ITERATION.match(above.rpartition("/")[2]) is None:
            return Claim()
        ranks = {
            tuple(map(int, filter(None, match.groups()))): entry
            for entry in sources.list_directory(path)
            if entry.directory and (match := DIRECTORY.match(entry.name))
        }
        paths = {rank: f"{entry.path.rstrip('/')}/{MODEL_FILE}" for rank, entry in sorted(ranks.items())}
        several = len(ranks) > 1 and any(sources.stat(file) is not None for file in paths.values())
        # One rank's file is whole, but not if its optimizer is in buffers beside it.
        alone = len(ranks) == 1 and all(
            sources.stat(file.removesuffix(MODEL_FILE) + name) is not None
            for file in paths.values()
            for name in (MODEL_FILE, BUFFERS_FILE)
        )
        if not several and not alone:
            return Claim()
        claim = Claim(directories={entry.name for entry in ranks.values()})
        claim.parts.append(Part(above, "megatron", partial(_read, above, paths)))
        return claim


def _read(directory: str, paths: dict[tuple[int, ...], str], table: FileTable, sources: Sources) -> PartContents:
    from fsdpckpt.readers.megatron_torch.read import read_megatron

    return read_megatron(directory, paths, table, sources)
