"""Random checkpoints through random renames and selections: no byte of what is written has an old name, but in the
notes that list what was renamed or left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fsdpckpt
from fsdpckpt.errors import FsdpckptError
from tests.converters.jobs import Job, save

WORDS = ("oldemb", "oldrope", "oldblocks", "oldlin", "oldscale", "oldnorm", "oldhead")  # in no other text
HISTORY = ("renamed", "normalised", "dropped")  # notes that say what an old name was
RENAME = {
    **{f"oldblocks.{n}.old{word}": f"newblocks.{n}.new{word}" for n in range(2) for word in ("lin", "scale")},
    **{f"oldblocks.{n}": f"newblocks.{n}" for n in range(2)},  # the rest of it: the extra state
    **{f"old{word}": f"new{word}" for word in ("emb", "rope", "norm", "head")},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.oldlin = nn.Linear(3, 3)
        self.register_buffer("oldscale", torch.ones(3, 3))

    def get_extra_state(self) -> Any:
        return torch.tensor(3)


class Model(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.oldemb = nn.Embedding(3, 3)
        self.register_buffer("oldrope", torch.ones(3, 3))
        self.oldblocks = nn.ModuleList(Block() for _ in range(2))
        self.oldnorm = nn.Linear(3, 1)
        self.oldhead = nn.Linear(3, 3, bias=False)
        if tied:
            self.oldhead.weight = self.oldemb.weight


def section(draw: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dicts of a model and its optimizer, by id or name, with or without ``param_names`` and wrappers."""
    model = Model(tied=draw.random() < 0.5)
    in_model = draw.choice(("", "", "_orig_mod.", "module."))
    in_optim = draw.choice(("", in_model))
    names = [name for name, _ in model.named_parameters()]
    by_name, words = draw.random() < 0.5, draw.random() < 0.5
    if by_name or words:  # else nothing says that this is the order
        names = names[:: draw.choice((1, -1))]
    cut = draw.randrange(len(names))
    groups = [part for part in (names[:cut], names[cut:]) if part]
    job = Job(model, groups, words=in_optim if words else None)
    return {in_model + name: leaf for name, leaf in job.model.items()}, job.named(in_optim) if by_name else job.ids


TARGETS: dict[str, dict[str, Any]] = {
    "full": {"to": "full"},
    "dcp": {"to": "sharded", "world_size": 2, "container": "dcp"},
    "ranks": {"to": "sharded", "world_size": 2, "container": "torch", "buffers": ["*rope", "*scale"]},
    "weights": {"to": "full", "container": "safetensors", "only": "model"},
    "flat": {"to": "flattened", "world_size": 2, "buffers": ["*rope", "*scale"], "use_orig_params": True},
}


def saved_in(folder: Path, draw: random.Random, target: str) -> Path:
    """A checkpoint of one model, or of two: as it was saved, or from rank files, DCP or flat parameters."""
    names = ("model",) if target == "weights" else draw.choice((("model",), ("actor", "critic")))
    content: dict[str, Any] = {}
    for name in names:
        content[name], content["optimizer" if name == "model" else f"{name}_optimizer"] = section(draw)
    save(content, str(folder / "a.pt"))
    how = draw.choice((None, None, "dcp", "ranks", "flat"))
    if how is not None:
        unit = {"unit": "oldblocks.*"} if how == "flat" else {}
        with suppress(FsdpckptError):  # else it stays as it was saved
            fsdpckpt.convert(folder / "a.pt", folder / "between", **TARGETS[how], **unit)
            return folder / "between"
    return folder / "a.pt"


def old_names_in(target: Path) -> Iterator[tuple[str, str]]:
    """(where, the text) of each old name that was written."""
    for path in sorted(target.rglob("*")) if target.is_dir() else [target]:
        data = path.read_bytes() if path.is_file() else b""
        if path.name == "fsdpckpt.json":
            document = json.loads(data)
            kept = [note for note in document["notes"] if note["kind"] not in HISTORY]
            data = json.dumps({**document, "notes": kept}).encode()
        for word in WORDS:
            if word.encode() in data:
                at = data.index(word.encode())
                yield path.name, repr(data[max(at - 60, 0) : at + 60])


@pytest.mark.parametrize("target", TARGETS)
def test_an_old_name_is_nowhere_in_what_is_written(tmp_path: Path, target: str) -> None:
    written = 0
    for seed in range(9):
        draw = random.Random(f"{target} {seed}")
        torch.manual_seed(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        options: dict[str, Any] = {**TARGETS[target], "rename": list(RENAME.items())}
        if target == "flat":
            options["unit"] = draw.choice(("oldblocks.*", "newblocks.*", "none"))
        elif target != "weights" and draw.random() < 0.5:
            options["key_type"] = draw.choice(("id", "name"))
        if draw.random() < 0.3:
            options["add_prefix"] = "net."
        if draw.random() < 0.3:
            options["exclude"] = ["*norm.*"]
            options["rename"] = [pair for pair in RENAME.items() if pair[0] != "oldnorm"]
        if draw.random() < 0.3 and target != "flat":
            options["clean_names"] = True
        source = saved_in(folder, draw, target)
        result = folder / ("new.pt" if target == "full" else "new")
        try:
            fsdpckpt.convert(source, result, **options)
        except FsdpckptError:
            continue  # what is not known is refused, as elsewhere
        written += 1
        assert [*old_names_in(result)] == [], options
    assert written >= 3
