"""Files made so that work for one thing is done for each other thing: time and memory stay in proportion to the file.

The limits are generous, and the square of the count would exceed them many times.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import time
import zipfile
from itertools import product
from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import NeedsInformationError, SourceUnsupportedError
from tests.hostile.opcodes import P2, name, text

SECONDS = 12.0  # of processor time
STORED = bytes(400)


def number(value: int) -> bytes:
    if value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(data)]) + data


def tensor(size: tuple[int, ...] = (100,), stride: tuple[int, ...] = (1,)) -> bytes:
    """A tensor of float32 on the storage 0 of 100 elements."""
    storage = b"(" + text("storage") + name("torch", "FloatStorage") + text("0") + text("cpu") + number(100) + b"tQ"
    sizes, strides = (b"(" + b"".join(map(number, numbers)) + b"t" for numbers in (size, stride))
    arguments = storage + b"K\x00" + sizes + strides + b"\x89" + name("collections", "OrderedDict") + b")R"
    return name("torch._utils", "_rebuild_tensor_v2") + b"(" + arguments + b"tR"


def write(path: Path, tensors: list[bytes]) -> Path:
    items = b"".join(text(f"w{number}") + each for number, each in enumerate(tensors))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", P2 + b"}(" + items + b"u.")
        archive.writestr("archive/data/0", STORED)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return path


def test_views_of_one_storage_take_no_list_of_all_for_each(tmp_path: Path) -> None:
    count = 8_000  # the square of it, as addresses, is 512 MB
    write(tmp_path / "views.pt", [tensor()] * count)
    code = """
import fsdpckpt
report = fsdpckpt.convert("views.pt", "out", to="sharded", world_size=2, buffers=("none",))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(report.tensors, int(peak.split()[1]) >> 10)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    tensors, peak = map(int, done.stdout.split())
    assert tensors == count
    assert peak < 250, f"{peak} MiB"


def test_shapes_and_strides_of_one_hash_are_not_compared_with_each_other(tmp_path: Path) -> None:
    """0 and 2**61 - 1 have one hash. A dimension of one element may have any stride."""
    strides = [(*each, 1) for each in product((0, (1 << 61) - 1), repeat=14)]
    assert len(set(map(hash, strides))) == 1
    source = write(tmp_path / "shapes.pt", [tensor((*([1] * 14), 100), stride) for stride in strides])
    begun = time.process_time()
    fsdpckpt.inspect(source)
    assert time.process_time() - begun < SECONDS


def test_states_in_no_group_are_named_where_a_format_has_no_place_for_them(tmp_path: Path) -> None:
    weight = torch.randn(3, 4)
    states = {key: {"exp_avg": weight + 1, "exp_avg_sq": weight + 2, "step": torch.tensor(1.0)} for key in (0, "0", 1)}
    optim = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    torch.save({"model": {"a": weight, "b": weight * 2}, "optimizer": optim}, tmp_path / "source.pt")
    with pytest.raises(SourceUnsupportedError, match="states of 1 key in no param group: 0"):
        fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "out", flavor="deepspeed-universal")


def saved(path: Path, params: list[list[int]], shape: tuple[int, ...] = (2,)) -> Path:
    count = sum(map(len, params))
    optimizer = {
        "state": {number: {"exp_avg": torch.zeros(shape)} for number in range(count)},
        "param_groups": [{"lr": 0.1, "params": each} for each in params],
    }
    torch.save({"model": {f"w{number}": torch.zeros(shape) for number in range(count)}, "optimizer": optimizer}, path)
    return path


@pytest.mark.parametrize("per_group", [1, 2])
def test_a_group_for_each_parameter_of_one_shape_is_soon_called_ambiguous(tmp_path: Path, per_group: int) -> None:
    count = 800
    groups = [list(range(at, at + per_group)) for at in range(0, count, per_group)]
    source = saved(tmp_path / "groups.pt", groups)
    begun = time.process_time()
    with pytest.raises(NeedsInformationError, match="more ways to name them than can be tried"):
        fsdpckpt.convert(source, tmp_path / "out.pt", to="full", key_type="name")
    assert time.process_time() - begun < SECONDS


def test_a_group_for_each_parameter_of_its_own_shape_is_named(tmp_path: Path) -> None:
    shapes = [(number + 1,) for number in range(600)]
    optimizer = {
        "state": {number: {"exp_avg": torch.zeros(shape)} for number, shape in enumerate(shapes)},
        "param_groups": [{"lr": 0.1, "params": [number]} for number in range(len(shapes))],
    }
    model = {f"w{number}": torch.zeros(shape) for number, shape in enumerate(shapes)}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "source.pt")
    begun = time.process_time()
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "out.pt", to="full", key_type="name")
    assert time.process_time() - begun < SECONDS
    assert list(torch.load(tmp_path / "out.pt")["optimizer"]["state"]) == list(model)


@pytest.mark.parametrize("name", ["a." * 990 + "w", "." * 990 + "w"])
def test_a_name_as_deep_as_modules_nest_is_written_as_flat_shards(name: str, tmp_path: Path) -> None:
    torch.save({"model": {"v": torch.zeros(2), name: torch.ones(3)}}, tmp_path / "source.pt")
    options = {"to": "flattened", "world_size": 2, "unit": ("none",), "buffers": ("none",), "use_orig_params": True}
    fsdpckpt.convert(tmp_path / "source.pt", tmp_path / "flat", **options)
    fsdpckpt.convert(tmp_path / "flat", tmp_path / "full.pt", to="full")
    assert set(torch.load(tmp_path / "full.pt")["model"]) == {"v", name}


@pytest.mark.parametrize("at", ["model", "root", "optimizer"])
def test_a_name_of_more_modules_than_can_nest_is_refused_and_takes_no_memory(at: str, tmp_path: Path) -> None:
    name, weight = "a." * 100_000 + "w", torch.ones(2)
    optimizer = {"state": {name: {"exp_avg": weight}}, "param_groups": [{"params": [name], "lr": 0.1}]}
    root = {"model": {"model": {name: weight}}, "root": {name: weight}, "optimizer": {"optimizer": optimizer}}[at]
    torch.save(root, tmp_path / "deep.pt")
    code = "import fsdpckpt\n"
    code += "try: fsdpckpt.inspect('deep.pt')\nexcept fsdpckpt.FsdpckptError as error: print(error.exit_code)\n"
    # The high-water mark of this program alone: ru_maxrss begins with that of the process that started it.
    code += "print(next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM')) >> 10)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    exit_code, peak = map(int, done.stdout.split())
    assert exit_code == 3
    assert peak < 600, f"{peak} MiB"
