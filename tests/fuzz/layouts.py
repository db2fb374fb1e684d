"""Whole checkpoints of every form that other programs save, the smallest of each, as their files.

``TINY`` has those of DeepSpeed, Megatron-LM, nanotron and torch_checkpointing, which ``tests.fuzz.tiny`` has made. The
layouts that frameworks make of PyTorch's formats are written by this program, as those frameworks load them.
"""

from __future__ import annotations

import io
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import fsdpckpt
from fsdpckpt.producers.recognition import all_flavors

TINY = Path(__file__).parent / "tiny.zip"

__all__ = ["BESIDE", "SAVED", "TINY", "WRITTEN", "contents", "files_of", "inputs_of", "is_torch", "pickle_in", "put"]

SAVED = (
    "zero", "universal", "autotp", "experts", "plain-experts", "autoep", "autoep-zero3", "autoep-universal",
    "pipeline", "pipeline-bf16", "megatron", "megatron-torch", "megatron-buffers", "megatron-grid", "nanotron",
    "torch_checkpointing",
)  # fmt: skip
"""Kinds of checkpoints in ``TINY``."""

WRITTEN = tuple(
    sorted(flavor.name for flavor in all_flavors() if flavor.forms and flavor.name != "deepspeed-universal")
)
"""The frameworks whose layouts this program writes."""

_BESIDE = {
    "olmo-core": "train/rank{}.pt",
    "prime-rl": "dataloader/dataloader_{}.pt",
    "automodel": "rng/rng_global_rank_{}.pt",
    "accelerate": "random_states_{}.pkl",
}
BESIDE = tuple(name.format(rank) for name in _BESIDE.values() for rank in range(2))
"""Files of two ranks beside the layouts of some."""


@cache
def files_of(kind: str) -> Mapping[str, bytes]:
    """The files of ``kind``, one of ``SAVED``, ``WRITTEN`` or other folders in ``TINY``, by path."""
    if kind in WRITTEN and kind not in SAVED:
        return _written(kind)
    with zipfile.ZipFile(TINY) as archive:
        prefix = f"{kind}/"
        return {name.removeprefix(prefix): archive.read(name) for name in archive.namelist() if name.startswith(prefix)}


def _written(flavor: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as directory, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source, target = put(files_of("pipeline"), Path(directory, "in")), Path(directory, "out")
        whole = {"container": "safetensors", "to": "full"} if flavor == "huggingface" else {"world_size": 2}
        fsdpckpt.convert(str(source), str(target), flavor=flavor, **whole)  # type: ignore[arg-type]
        (target / "fsdpckpt.json").unlink()
        files = contents(target)
    one = files_of("torch_checkpointing")["step_0.pt"]
    files.update({_BESIDE[flavor].format(rank): one for rank in range(2)} if flavor in _BESIDE else {})
    return files


def contents(directory: Path) -> dict[str, bytes]:
    """All files below ``directory``."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def put(files: Mapping[str, bytes], directory: Path) -> Path:
    """Write ``files`` to ``directory``."""
    for name, data in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory


def is_torch(path: str, content: bytes) -> bool:
    """Whether it is a file of ``torch.save``: items in ``.distcp`` are several of them."""
    return content.startswith(b"PK") and not path.endswith(".distcp")


def pickle_in(file: bytes) -> bytes:
    """The pickle in a torch file."""
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        return next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))


def inputs_of(*kinds: str) -> Iterator[bytes]:
    """Each file of each of ``kinds`` as it is: two bytes that say which it is, then the pickle of a torch file, or the
    content.
    """
    for at, kind in enumerate(kinds):
        for number, (path, content) in enumerate(sorted(files_of(kind).items())):
            yield bytes([at, number]) + (pickle_in(content) if is_torch(path, content) else content)
