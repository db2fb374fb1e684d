"""One changed bit in a checkpoint: what ``verify`` says of it, and what ``convert`` makes of it."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import fsdpckpt
from fsdpckpt.converters import Report
from fsdpckpt.errors import FsdpckptError
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.storage.sources import Sources
from fsdpckpt.verify.compare import compare
from fsdpckpt.verify.integrity import verify_checkpoint

__all__ = [
    "FORMS", "PROTECTED", "WITHOUT_CHECKSUMS", "WRITTEN", "Outcome", "files_of", "flip_each", "found_each",
    "make", "places",
]  # fmt: skip

SEED = 33
WRITTEN: dict[str, dict[str, Any]] = {
    "torch ranks": {"to": "sharded", "container": "torch", "world_size": 2, "buffers": ("none",)},
    "dcp": {"to": "sharded", "container": "dcp", "world_size": 2, "buffers": ("none",)},
    "safetensors": {"to": "full", "container": "safetensors"},
    "flattened": {"to": "flattened", "world_size": 2, "unit": ("none",), "use_orig_params": True},
    "universal": {"flavor": "deepspeed-universal"},
}
FORMS = [f"{name}{ending}" for name in WRITTEN for ending in ("", " without fsdpckpt.json")]
FORMS += ["safetensors by name", "torch.save", "dcp.save", "save_file"]
WITHOUT_CHECKSUMS = {"safetensors without fsdpckpt.json", "safetensors by name", "save_file"}
ANOTHER_COPY = "found by verify, in a copy that convert does not read"
PROTECTED = {"found", "harmless", "refused by convert alone", "in .metadata, not protected", ANOTHER_COPY}
"""What may come of a bit where records have a checksum."""
VERIFY_ALONE = "FOUND BY VERIFY ALONE"  # never


@dataclass(frozen=True, slots=True)
class Outcome:
    """``verified``: whether ``verify`` found it. ``converted``: "refused", "right" (what is written is what an
    undamaged source gives), "wrong", or "warned" (wrong, and a warning says what is odd).
    """

    file: str
    place: int
    verified: bool
    converted: str

    @property
    def kind(self) -> str:
        if not self.verified and self.converted == "wrong" and self.file == ".metadata":  # a pickle without checksum
            return "in .metadata, not protected"
        if self.converted == "refused":
            return "found" if self.verified else "refused by convert alone"
        if self.converted == "warned" and self.verified:
            return "found by verify, a warning of convert"
        if self.verified:
            return ANOTHER_COPY if self.converted == "right" else VERIFY_ALONE
        return "harmless" if self.converted == "right" else "not protected"


def state(key: int | str = 0) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(SEED)
    model = {"w": torch.randn(3, 2, generator=draw)}
    states = {key: {"exp_avg": torch.randn(3, 2, generator=draw), "step": torch.tensor(4.0)}}
    return {"model": model, "optimizer": {"state": states, "param_groups": [{"lr": 0.1, "params": [key]}]}}


def make(form: str, directory: Path, **options: Any) -> Path:
    """A tiny checkpoint of this form, in ``directory``. ``options`` replace those of WRITTEN."""
    whole = directory / "whole"
    if form == "torch.save":
        torch.save(state(), directory / "whole.pt")
        return directory / "whole.pt"
    if form == "dcp.save":
        dcp.save(state(), checkpoint_id=whole, no_dist=True)
        return whole
    if form == "save_file":
        save_file(state()["model"], directory / "whole.safetensors")
        return directory / "whole.safetensors"
    by_name = form == "safetensors by name"
    torch.save(state("w" if by_name else 0), directory / "source.pt")
    written = "safetensors" if by_name else form.removesuffix(" without fsdpckpt.json")
    fsdpckpt.convert(directory / "source.pt", whole, **WRITTEN[written] | options)
    if form not in WRITTEN:
        units = json.loads((whole / "fsdpckpt.json").read_text())["units"]
        os.unlink(whole / "fsdpckpt.json")
        if units is not None:
            (directory / "units.json").write_text(json.dumps(units))
    return whole


def places(whole: Path) -> list[tuple[Path, int]]:
    """Every byte of every file."""
    return [(path, at) for path in files_of(whole) for at in range(path.stat().st_size)]


def files_of(whole: Path) -> list[Path]:
    return sorted(path for path in whole.rglob("*") if path.is_file()) if whole.is_dir() else [whole]


def found_each(whole: Path, chosen: list[tuple[Path, int]]) -> Iterator[bool]:
    """Whether ``verify`` finds one changed bit at each of the ``chosen`` places, one at a time."""
    before = _problems(whole)
    for _ in _changed_at(chosen):
        yield _is_found(whole, before)


def flip_each(whole: Path, chosen: list[tuple[Path, int]], scratch: Path) -> Iterator[Outcome]:
    """What comes of one changed bit at each of the ``chosen`` places, one at a time."""
    units = whole.parent / "units.json"  # what flat shards without a manifest need
    options: dict[str, Any] = {"units": units} if units.exists() else {}
    right = fsdpckpt.convert(whole, scratch / "right.pt", to="full", **options)
    before, warned = _problems(whole), _warnings(right)
    for path, place in _changed_at(chosen):
        name = str(path.relative_to(whole)) if path != whole else path.name
        yield Outcome(name, place, _is_found(whole, before), _converted(whole, scratch, options, warned))


def _changed_at(chosen: list[tuple[Path, int]]) -> Iterator[tuple[Path, int]]:
    """One bit is changed while each place is given."""
    draw = random.Random(SEED)
    for path, place in chosen:
        status = path.stat()
        data = path.read_bytes()
        changed = bytes([data[place] ^ (1 << draw.randrange(8))])
        with path.open("r+b") as file:
            file.seek(place)
            file.write(changed)
        try:
            yield path, place
        finally:
            path.write_bytes(data)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _problems(whole: Path) -> frozenset[str]:
    with Sources() as sources:
        checkpoint = open_checkpoint(str(whole), sources=sources)
        return frozenset(one.message for one in verify_checkpoint(checkpoint, sources=sources, threads=1).problems)


def _is_found(whole: Path, before: frozenset[str]) -> bool:
    try:
        return bool(_problems(whole) - before)
    except FsdpckptError as error:
        _require_code(error)
        return True


def _warnings(report: Report) -> frozenset[str]:
    return frozenset(note.message for note in report.notes if note.warning)


def _converted(whole: Path, scratch: Path, options: dict[str, Any], before: frozenset[str]) -> str:
    out = scratch / "out.pt"
    try:
        report = fsdpckpt.convert(whole, out, to="full", threads=1, **options)
    except FsdpckptError as error:
        _require_code(error)
        assert not out.exists()
        return "refused"
    try:
        if out.is_file() and out.read_bytes() == (scratch / "right.pt").read_bytes():
            return "right"
        with Sources() as sources:
            one, two = (open_checkpoint(str(path), sources=sources) for path in (out, scratch / "right.pt"))
            if compare(one, two, sources=sources, threads=1).same:
                return "right"
    except FsdpckptError:  # they cannot even be compared
        pass
    else:
        return "warned" if _warnings(report) - before else "wrong"
    finally:
        shutil.rmtree(out) if out.is_dir() else out.unlink()


def _require_code(error: FsdpckptError) -> None:
    assert error.exit_code in (2, 3, 4), error
