"""Describes what is at a path: one checkpoint, several of a run, or what is left of one. Reads no tensor data."""

from fsdpckpt.describe.describe import Description, describe, json_value, stored_files
from fsdpckpt.describe.incomplete import Incomplete, describe_incomplete, suggest_readable
from fsdpckpt.describe.rank_grid import FileGrid, FilesOfRanks, FileState, rank_grid
from fsdpckpt.describe.run import Run, RunCheckpoint, describe_run

__all__ = [
    "Description",
    "FileGrid",
    "FileState",
    "FilesOfRanks",
    "Incomplete",
    "Run",
    "RunCheckpoint",
    "describe",
    "describe_incomplete",
    "describe_run",
    "json_value",
    "rank_grid",
    "stored_files",
    "suggest_readable",
]
