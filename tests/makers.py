"""How a row of a table makes its checkpoint: each function returns a ``Make`` that fills an empty directory.

``copied(path, *changes)`` is a saved checkpoint and ``files(contents, *changes)`` one of torch files; a ``Change`` is
what happened to it since: ``lose("*rank_1*")``, ``cut("__0_0.distcp")``, ``swap(one, other)``.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

__all__ = [
    "GOLDEN", "Change", "Make", "add", "add_copy", "copied", "cut", "dcp_of", "edit", "files", "lose", "move", "packed",
    "put", "safetensors", "save", "swap", "together",
]  # fmt: skip

GOLDEN = Path(__file__).parent / "golden"

Make = Callable[[Path], "Path | None"]
"""Fills an empty directory with a checkpoint; returns what a user names to read it: None is the directory."""
Change = Callable[[Path], object]
"""Changes a checkpoint in its directory."""


def _changed(directory: Path, changes: tuple[Change, ...], given: str) -> Path:
    for change in changes:
        change(directory)
    return directory / given


def copied(source: Path | Callable[[], Path], *changes: Change, given: str = "") -> Make:
    """A copy of ``source`` without its truth, changed; ``given``: what below it is read."""

    def make(directory: Path) -> Path:
        path = source if isinstance(source, Path) else source()
        shutil.copytree(path, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("truth*"))
        return _changed(directory, changes, given)

    return make


def packed(archive: Path, top: str = "", *changes: Change, given: str = "") -> Make:
    """What an archive has below ``top``, without its truth, changed."""

    def make(directory: Path) -> Path:
        inside = directory / top
        with tarfile.open(archive) as opened:
            opened.extractall(directory, filter="data")
        for truth in directory.glob("**/truth*"):
            truth.unlink()
        return _changed(inside, changes, given)

    return make


def with_truth(top: Path, archives: Iterable[Path]) -> Path:
    """Unpack each archive below ``top``, with the truth of a run, if it has one, beside its directory."""
    for archive in archives:
        with tarfile.open(archive) as opened:
            opened.extractall(top, filter="data")
        name = archive.name.removesuffix(".tar.xz")
        if (top / name / "truth.pt").exists():
            (top / name / "truth.pt").rename(top / f"{name}.pt")
    return top


def files(contents: Mapping[str, Any] | Callable[[], Mapping[str, Any]], *changes: Change, given: str = "") -> Make:
    """Files by name: bytes and text as they are, a document as JSON where the name says so, the rest by torch.save."""

    def make(directory: Path) -> Path:
        for name, content in (contents if isinstance(contents, Mapping) else contents()).items():
            put(name, content)(directory)
        return _changed(directory, changes, given)

    return make


def dcp_of(content: Mapping[str, Any] | Callable[[], Mapping[str, Any]], *changes: Change, at: str = "") -> Make:
    """The DCP directory that one process saves, at ``at``."""

    def make(directory: Path) -> Path:
        state = content if isinstance(content, Mapping) else content()
        dcp.save(dict(state), checkpoint_id=directory / at, no_dist=True)
        return _changed(directory, changes, "")

    return make


def safetensors(name: str, tensors: Mapping[str, torch.Tensor], **metadata: str) -> Make:
    """A file of safetensors."""

    def make(directory: Path) -> None:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), directory / name, metadata or None)

    return make


def together(*makes: Make | Change) -> Make:
    """Several in one directory, or one that is then changed."""

    def make(directory: Path) -> None:
        for one in makes:
            one(directory)

    return make


# Changes


def found(directory: Path, glob: str) -> list[Path]:
    """The files and folders that ``glob`` names, of which there is at least one."""
    paths = sorted(directory.glob(glob))
    assert paths, f"nothing to change: {glob}"
    return paths


def lose(*globs: str) -> Change:
    """Files and folders are gone."""

    def change(directory: Path) -> None:
        for path in (path for glob in globs for path in found(directory, glob)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def cut(*globs: str, by: int = 1) -> Change:
    """Files end ``by`` bytes early."""

    def change(directory: Path) -> None:
        for path in (path for glob in globs for path in found(directory, glob)):
            os.truncate(path, path.stat().st_size - by)

    return change


def move(old: str, new: str) -> Change:
    """One file has another name."""
    return lambda directory: (directory / old).rename(directory / new)


def swap(one: str, other: str) -> Change:
    """Two files have each other's names."""
    return lambda directory: (
        move(one, "aside")(directory),
        move(other, one)(directory),
        move("aside", other)(directory),
    )


def add_copy(name: str, new: str) -> Change:
    """One file is there under a second name, too."""
    return lambda directory: shutil.copy(directory / name, directory / new)


def add(source: Path, glob: str) -> Change:
    """Files of another checkpoint are there, too, in place of those with the same names."""
    return lambda directory: [shutil.copy(path, directory / path.name) for path in found(source, glob)]


def put(name: str, content: Any) -> Change:
    """A file has this content."""

    def change(directory: Path) -> None:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content)
        elif path.suffix == ".json":
            path.write_text(json.dumps(content))
        else:
            torch.save(content, path)

    return change


def save(content: Any, path: Path) -> Path:
    """What ``put`` writes or, where the name says so, safetensors; a DCP directory where it has no suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(content, path)
    elif path.suffix:
        put(path.name, content)(path.parent)
    else:
        dcp.save(content, checkpoint_id=path, no_dist=True)
    return path


def edit(glob: str, change_content: Callable[[Any], object]) -> Change:
    """What torch files hold is another: ``change_content`` changes it in place."""

    def change(directory: Path) -> None:
        for path in found(directory, glob):
            content = torch.load(path, weights_only=False)
            change_content(content)
            torch.save(content, path)

    return change
