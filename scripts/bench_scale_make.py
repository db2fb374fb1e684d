"""Makes the DCP directory that FSDP2 and AdamW leave of Llama 3 405B on any number of ranks, with holes for its data.

    bench_scale_make.py DIRECTORY RANKS [--model 70B] [--layers N] [--columns N] [--items]

Names and shapes are the model's own; ``--columns`` cuts every matrix to that width. ``.metadata`` has the opcodes that
the pickler of torch makes of a coordinator's plan (``planner_helpers.py``, ``filesystem.py``): nothing in it is shared
but names, attributes and the path of a file. Rows are cut by ceil(rows / ranks), as DTensor does, and the ranks beyond
the last row have one empty chunk among them. ``--items`` writes the archives around the holes as well, which what
copies needs and ``inspect`` does not.
"""

from __future__ import annotations

import argparse
import io
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from typing import BinaryIO

GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "fused": True}
METADATA, FILESYSTEM = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
DTYPE, ITEMSIZE = "bfloat16", 2
SMALL = 2 << 20  # bytes of an item that is written whole

Size = tuple[int, ...]


MODELS = {"405B": (126, 16384, 53248), "70B": (80, 8192, 28672)}
"""Layers, width, and width of the feed-forward network."""


def parameters(layers: int, columns: int | None, model: str = "405B") -> dict[str, Size]:
    _, width, ffn = MODELS[model]
    kv, vocabulary = 1024, 128256
    block = {
        **{
            f"self_attn.{name}_proj.weight": (rows, width)
            for name, rows in zip("qkvo", (width, kv, kv, width), strict=True)
        },
        **{f"mlp.{name}_proj.weight": shape for name, shape in (("gate", (ffn, width)), ("up", (ffn, width)))},
        "mlp.down_proj.weight": (width, ffn),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    shapes: dict[str, Size] = {"model.embed_tokens.weight": (vocabulary, width)}
    shapes |= {f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in block.items()}
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (vocabulary, width)}
    return {
        name: shape if columns is None else (shape[0], *[columns] * (len(shape) - 1)) for name, shape in shapes.items()
    }


def tensors(shapes: dict[str, Size]) -> dict[tuple[str | int, ...], Size]:
    """Every tensor by its path: sharded ones, and one scalar for each parameter."""
    paths: dict[tuple[str | int, ...], Size] = {("model", name): shape for name, shape in shapes.items()}
    for name, shape in shapes.items():
        paths |= {("optim", "state", name, state): shape for state in ("exp_avg", "exp_avg_sq")}
        paths[("optim", "state", name, "step")] = ()
    return paths


def boxes(shape: Size, ranks: int) -> list[tuple[Size, Size]]:
    """Start and size of each rank's chunk; the last one may be empty."""
    if not shape:
        return [((), ())]
    rows = -(-shape[0] // ranks)
    starts = list(range(0, shape[0], rows))
    starts += [shape[0]] * (len(starts) < ranks)
    rest = shape[1:]
    return [((start, *[0] * len(rest)), (min(rows, shape[0] - start), *rest)) for start in starts]


@cache
def archive(size: Size) -> tuple[bytes, int, bytes]:
    """What torch.save writes for one tensor: the bytes before a hole, its length, the bytes after it."""
    import torch

    nbytes = ITEMSIZE
    for extent in size:
        nbytes *= extent
    if nbytes < SMALL:
        buffer = io.BytesIO()
        torch.save(torch.ones(size, dtype=getattr(torch, DTYPE)), buffer)
        return buffer.getvalue(), 0, b""
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "archive.pt")
        with torch.serialization.skip_data():
            torch.save(torch.empty(size, dtype=getattr(torch, DTYPE)), path)
        total = os.path.getsize(path)
        with open(path, "rb") as file:
            head = file.read(4096).rstrip(b"\0")
            file.seek(total - 4096)
            tail = file.read().lstrip(b"\0")
    return head, total - len(head) - len(tail), tail


class Pickle:
    """Opcodes of protocol 4 in frames; texts and names are memoised."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._parts = bytearray()
        self._memo: dict[object, bytes] = {}
        self._count = 0
        file.write(b"\x80\x04")

    def put(self, opcodes: bytes, memoised: int = 0) -> None:
        self._parts += opcodes
        self._count += memoised

    def flush(self, *, least: int = 1 << 16) -> None:
        if len(self._parts) >= least:
            self._file.write(b"\x95" + struct.pack("<Q", len(self._parts)) + self._parts)
            self._parts.clear()

    def text(self, text: str, *, shared: bool = True) -> None:
        if shared and text in self._memo:
            self.put(self._memo[text])
            return
        data = text.encode()
        self.put((b"\x8c" + bytes((len(data),)) if len(data) < 256 else b"X" + struct.pack("<I", len(data))) + data)
        self._memoise(text)

    def name(self, module: str, name: str) -> None:
        if (module, name) in self._memo:
            self.put(self._memo[module, name])
            return
        self.text(module)
        self.text(name)
        self.put(b"\x93")
        self._memoise((module, name))

    def _memoise(self, key: object) -> None:
        number = self._count
        self.put(b"\x94", 1)
        self._memo[key] = b"h" + bytes((number,)) if number < 256 else b"j" + struct.pack("<I", number)

    def new(self, module: str, name: str) -> None:
        """An instance, and its attributes up to ``ub``."""
        self.name(module, name)
        self.put(b")\x81\x94}\x94(", 2)

    def integer(self, value: int) -> None:
        if value < 1 << 31:
            self.put(
                b"K%c" % value
                if value < 256
                else struct.pack("<cH", b"M", value)
                if value < 65536
                else b"J" + struct.pack("<i", value)
            )
        else:
            nbytes = value.bit_length() // 8 + 1
            self.put(b"\x8a" + bytes((nbytes,)) + value.to_bytes(nbytes, "little"))

    def size(self, extents: Size) -> None:
        self.name("torch", "Size")
        for extent in extents:
            self.integer(extent)
        self.put([b")", b"\x85\x94", b"\x86\x94", b"\x87\x94"][len(extents)] + b"\x85\x94R\x94", 2 + bool(extents))

    def attribute(self, name: str, value: int | Size | str | None) -> None:
        self.text(name)
        if isinstance(value, tuple):
            self.size(value)
        elif isinstance(value, int):
            self.integer(value)
        elif value is None:
            self.put(b"N")
        else:
            self.text(value, shared=name != "fqn")


def batches(pickle: Pickle, entries: Sequence[object], close: bytes) -> Iterator[object]:
    """``entries`` one by one, a thousand in a batch."""
    for number, entry in enumerate(entries):
        if number % 1000 == 0:
            pickle.put(b"(")
        yield entry
        if number % 1000 == 999 or number == len(entries) - 1:
            pickle.put(close)
        pickle.flush()


def write_metadata(
    path: str, paths: dict[tuple[str | int, ...], Size], values: dict[tuple[str | int, ...], bytes], ranks: int
) -> dict[int, list[Size | bytes]]:
    """Write ``.metadata``; returns what each rank's data file holds: a value's bytes, or the size of a tensor."""
    cut = {key: boxes(shape, ranks) for key, shape in paths.items()}
    holds: dict[int, list[tuple[tuple[str | int, ...], int]]] = {rank: [] for rank in range(ranks)}
    turn = 0
    for key, chunks in cut.items():
        for number, _ in enumerate(chunks):
            holder = number if len(chunks) > 1 else (turn := (turn + 1) % ranks)
            holds[holder].append((key, number))
    with open(path, "wb") as file:
        pickle = Pickle(file)
        pickle.new(METADATA, "Metadata")
        pickle.text("state_dict_metadata")
        pickle.put(b"}\x94", 1)
        for key in batches(pickle, [*paths, *values], b"u"):
            pickle.text(".".join(map(str, key)))
            if key in values:
                pickle.name(METADATA, "BytesStorageMetadata")
                pickle.put(b")\x81\x94", 1)
                continue
            pickle.new(METADATA, "TensorStorageMetadata")
            pickle.text("properties")
            pickle.name(METADATA, "TensorProperties")
            pickle.put(b")\x81\x94(", 1)
            pickle.name("torch", DTYPE)
            pickle.name("torch.serialization", "_get_layout")
            pickle.text("torch.strided")
            pickle.put(b"\x85\x94R\x94\x89", 2)
            pickle.name(METADATA, "_MEM_FORMAT_ENCODING")
            pickle.put(b"K\x00\x85\x94R\x94\x89t\x94b", 3)
            pickle.attribute("size", paths[key])
            pickle.text("chunks")
            pickle.put(b"]\x94", 1)
            for start, size in batches(pickle, cut[key], b"e"):
                pickle.new(METADATA, "ChunkStorageMetadata")
                pickle.attribute("offsets", start)
                pickle.attribute("sizes", size)
                pickle.put(b"ub")
            pickle.put(b"ub")
        pickle.text("planner_data")
        pickle.put(b"}\x94", 1)
        for key in batches(pickle, [*paths, *values], b"u"):
            pickle.text(".".join(map(str, key)))
            pickle.put(b"(")
            for element in key:
                pickle.integer(element) if isinstance(element, int) else pickle.text(element)
            pickle.put(b"t\x94", 1)
        pickle.text("storage_data")
        pickle.put(b"}\x94", 1)
        content: dict[int, list[Size | bytes]] = {rank: [] for rank in range(ranks)}
        items = [(0, key, None) for key in values]
        items += [(rank, key, number) for rank, held in holds.items() for key, number in held]
        at = [0] * ranks
        for rank, key, number in batches(pickle, items, b"u"):
            pickle.new(METADATA, "MetadataIndex")
            pickle.attribute("fqn", ".".join(map(str, key)))
            pickle.attribute("index", number)
            if number is not None:
                pickle.attribute("offset", cut[key][number][0])
                content[rank].append(cut[key][number][1])
                before, hole, after = archive(cut[key][number][1])
                nbytes = len(before) + hole + len(after)
            else:
                content[rank].append(values[key])
                nbytes = len(values[key])
            pickle.put(b"ub")
            pickle.new(FILESYSTEM, "_StorageInfo")
            pickle.attribute("relative_path", f"__{rank}_0.distcp")
            pickle.attribute("offset", at[rank])
            pickle.attribute("length", nbytes)
            pickle.put(b"ub")
            at[rank] += nbytes
        pickle.text("storage_meta")
        pickle.put(b"N")
        pickle.attribute("version", "1.0.0")
        pickle.put(b"ub.")
        pickle.flush(least=1)
    return content


def write_data(path: str, content: list[Size | bytes], *, items: bool) -> None:
    """One data file; of the tensors only its length without ``items``."""
    with open(path, "wb") as file:
        at = 0
        for held in content:
            before, hole, after = (held, 0, b"") if isinstance(held, bytes) else archive(held)
            if items or isinstance(held, bytes):
                file.seek(at)
                file.write(before)
                file.seek(hole, os.SEEK_CUR)
                file.write(after)
            at += len(before) + hole + len(after)
        file.truncate(at)


def saved(value: object) -> bytes:
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def make(
    directory: str,
    ranks: int,
    *,
    layers: int | None = None,
    columns: int | None = None,
    items: bool = False,
    model: str = "405B",
) -> None:
    shapes = parameters(MODELS[model][0] if layers is None else layers, columns, model)
    group = {**GROUP, "params": list(shapes)}
    values = {("optim", "param_groups", 0, name): saved(value) for name, value in group.items()}
    os.makedirs(directory)
    content = write_metadata(os.path.join(directory, ".metadata"), tensors(shapes), values, ranks)
    for rank, held in content.items():
        write_data(os.path.join(directory, f"__{rank}_0.distcp"), held, items=items)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("ranks", type=int)
    parser.add_argument("--model", choices=tuple(MODELS), default="405B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--columns", type=int)
    parser.add_argument("--items", action="store_true")
    given = parser.parse_args()
    make(
        given.directory,
        given.ranks,
        layers=given.layers,
        columns=given.columns,
        items=given.items,
        model=given.model,
    )
