"""Tensors that are taken out of a pickle in bulk: what comes of it is compared with reading them one by one."""

from __future__ import annotations

import io
import random
import struct
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fsdpckpt
from fsdpckpt.errors import FsdpckptError
from fsdpckpt.formats.torch import bulk, local_tensor, open_archive, parse_archive
from fsdpckpt.storage.local import MemoryFile
from tests.formats.torch_saves import INTEGERS, any_values, rewritten, saved
from tests.fuzz.mutations import mutated
from tests.readers.alike import Refusal, plain

DTYPES = (*INTEGERS, torch.float32, torch.bfloat16, torch.float64, torch.bool, torch.complex64, torch.float8_e4m3fn)
FILE = 3


@pytest.fixture(autouse=True)
def small_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_WORTH", 0)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many tensors were taken out of each pickle that was read in bulk to its end."""
    counts: list[int] = []
    parse = bulk.parse_archive

    def counting(opened: Any, file_id: int, leaf: Any, builder: Any = None) -> Any:
        archive = parse(opened, file_id, leaf, builder)
        counts.append(0 if builder is None else len(builder._made))
        return archive

    monkeypatch.setattr(bulk, "parse_archive", counting)
    yield counts


def same_end(data: bytes) -> object:
    """What reading ``data`` comes to, which is the same in bulk and tensor by tensor."""
    source = MemoryFile(data, "it.pt")
    found: list[object] = []
    for read in (
        lambda: bulk.read_tensors(source, FILE),
        lambda: parse_archive(open_archive(source), FILE, lambda stored: local_tensor(stored, FILE)),
    ):
        try:
            archive = read()
        except FsdpckptError as error:
            found.append(Refusal(error))
        else:
            sums = archive.checksums
            columns = [column.tolist() for column in (sums.file, sums.offset, sums.nbytes, sums.crc)]
            found.append((plain(archive.root), columns, archive.dropped, archive.forms))
    assert found[0] == found[1]
    return found[0]


def pickle_of(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))


def random_state(seed: int, count: int) -> dict[str, Any]:
    generator = random.Random(seed)
    model: dict[str, Any] = OrderedDict() if seed % 2 else {}
    for number in range(count):
        shape = tuple(generator.choice((0, 1, 2, 3, 7)) for _ in range(generator.randrange(6)))
        value = any_values(shape, generator.choice(DTYPES), number)
        if generator.random() < 0.2 and value.ndim > 1:
            value = value.transpose(0, 1)
        if generator.random() < 0.1 and shape and shape[0] > 1:
            value = value[1:]
        model["x" * generator.choice((0, 1, 200, 255, 256, 700)) + f"layers.{number}"] = value
    state = {name: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3), "m": None} for name in list(model)[::2]}
    extra = {"lr": 1e-3, "big": 1 << 40, "text": "é" * 300, "flags": [True, False, (1, 2.5)], 7: {"a": -5}}
    return {"model": model, "optimizer": {"state": state, "param_groups": [{"params": list(state)}]}, **extra}


@pytest.mark.parametrize("seed", range(6))
def test_any_state_dict_comes_to_the_same(seed: int, taken: list[int]) -> None:
    each = same_end(saved(random_state(seed, (1, 3, 40, 400)[seed % 4])))
    assert not isinstance(each, Refusal)
    assert len(taken) == 1


def test_nearly_all_tensors_are_taken_at_once_whoever_wrote_them(taken: list[int], tmp_path: Path) -> None:
    state = {f"layers.{number}.weight": any_values((2, number % 5), torch.float32, number) for number in range(3000)}
    state["tied"] = torch.zeros(3)
    torch.save(state, tmp_path / "a.pt")
    fsdpckpt.convert(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), to="full")
    taken.clear()
    for name in ("a.pt", "b.pt"):
        same_end((tmp_path / name).read_bytes())
    assert min(taken) >= 3000


@pytest.mark.parametrize("inside", [False, True], ids=["dict", "record"])
def test_tied_tensors_and_tensors_in_records(inside: bool, taken: list[int]) -> None:
    weights = {f"w{number}": torch.ones(number) for number in range(20)}
    state: dict[str, Any] = {"model": weights, "tied": weights["w7"], "tensors": [torch.ones(2), (torch.ones(3),)]}
    if inside:
        state = {"model": weights, "args": Namespace(a=1, tensors=[torch.ones(2)], w={"x": torch.ones(2)})}
    each = same_end(saved(state))
    assert isinstance(each, Refusal) == inside
    assert taken == ([] if inside else [0])  # something refers to a tensor: all are read one by one


def test_subclasses_and_marks_are_left_to_the_general_reader(taken: list[int]) -> None:
    cloned = torch.ones(3)
    cloned._has_been_cloned = True  # type: ignore[attr-defined]
    for odd in (torch.nn.Parameter(torch.ones(2)), cloned, torch.ones(2).to(torch.float8_e5m2)):
        state = {"odd": odd, **{f"w{number}": torch.ones(number) for number in range(20)}}
        same_end(saved(state))
    assert taken == [0, 0, 0]


PLAIN = saved({f"w{number}": torch.ones(number + 1) for number in range(50)} | {"again": ["w1", "w2"]})


def of_plain(pickled: bytes) -> bytes:
    return rewritten(PLAIN, {"data.pkl": pickled})


def test_references_to_what_was_taken_out_are_seen(taken: list[int]) -> None:
    """The last value is a reference: to the shape of a tensor, its key, its arguments, or the tensor itself."""
    pickled = pickle_of(PLAIN)
    assert pickled.endswith(b"e" + b"u.") or pickled.endswith(b"eu.")
    for place in (*range(60, 110), *range(240, 280)):  # of several tensors each, and of one byte and of four
        put = b"h%c" % place if place < 256 else b"j" + struct.pack("<I", place)
        same_end(of_plain(pickled[:-2] + put + b"0u."))
        same_end(of_plain(pickled[:-2] + b"X\x01\x00\x00\x00n" + put + b"u."))


def test_persistent_ids_of_the_file_itself_name_no_tensor() -> None:
    pickled = pickle_of(PLAIN)
    for pid in (b"K\x00", b"J\x05\x00\x00\x00", b"K\x05q\xff", b"(K\x05K\x06tq\xfe0K\x05"):
        each = same_end(of_plain(pickled[:-2] + b"X\x01\x00\x00\x00n" + pid + b"Qu."))
        assert isinstance(each, Refusal)


@pytest.mark.parametrize("at", ["before", "between"])
def test_a_memo_place_that_is_written_again_is_believed(at: str) -> None:
    """The class of the storages becomes another one, half way through, or at the begin."""
    pickled = pickle_of(PLAIN)
    place = pickled[pickled.index(b"ctorch\nFloatStorage\n") + 20 :][:2]
    for name in (b"ctorch\nIntStorage\n", b"ctorch\nDoubleStorage\n", b"X\x01\x00\x00\x00a"):
        cut = pickled.index(b"X\x02\x00\x00\x00w1") if at == "before" else pickled.index(b"X\x03\x00\x00\x00w30")
        same_end(of_plain(pickled[:cut] + name + place + b"0" + pickled[cut:]))


@pytest.mark.parametrize("seed", range(4))
def test_damage_comes_to_the_same_end(seed: int, tmp_path: Path) -> None:
    """A number, a text, an opcode is changed, among tensors above all."""
    generator = random.Random(seed)
    state = {f"w{number}": torch.ones(number % 7, 2) for number in range(80)}
    data = saved({"model": state, "step": torch.tensor(1), "x": [1, 2.5, "abc"]})
    if seed % 2:
        source, target = tmp_path / "a.pt", tmp_path / "b.pt"
        source.write_bytes(data)
        fsdpckpt.convert(source, target, to="full")
        data = target.read_bytes()
    refused = 0
    for number in range(120):
        pickled = bytearray(pickle_of(data))
        if number % 4 == 0:
            pickled = bytearray(mutated(generator, [bytes(pickled)]))
        else:
            place = generator.randrange(len(pickled))
            pickled[place] = generator.choice((pickled[place] ^ 1, pickled[place] + 1 & 0xFF, generator.randrange(256)))
        each = same_end(rewritten(data, {"data.pkl": bytes(pickled)}))
        refused += isinstance(each, Refusal)
    assert 0 < refused < 120
