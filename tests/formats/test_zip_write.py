from __future__ import annotations

import os
import zipfile
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdpckpt.formats.pickle.opcodes import StorageView
from fsdpckpt.formats.pickle.write import dumps
from fsdpckpt.formats.zip_write import ALIGNMENT, TorchZip
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.targets import Target, TargetFile, WrittenTensor
from fsdpckpt.ir.tensors import Chunks, Tensor
from tests.materialise import file_bytes, materialise

FLOAT = DTYPES["float32"]


def flat(numel: int, offset: int = 0) -> Tensor:
    return Tensor(FLOAT, (numel,), Chunks.whole(file=0, offset=offset, shape=(numel,)))


def archive_of(tensors: list[Tensor], *, stem: str = "archive", lead: bytes = b"") -> TargetFile:
    """A torch file that holds a list of 1-D tensors, after ``lead``."""
    keys = {id(tensor): str(key) for key, tensor in enumerate(tensors)}
    file = TargetFile("")
    file.add_literal(lead)
    archive = TorchZip(file, stem=stem)
    hook = lambda t: StorageView(keys[id(t)], FLOAT, 0, t.shape, (1,), t.nbytes)  # noqa: E731
    archive.pickle(dumps(list(tensors), hook))
    for key, tensor in enumerate(tensors):
        archive.begin_data(str(key), tensor.nbytes)
        file.add_write_item(tensor)
    assert archive.finish() == file.nbytes - len(lead)
    return file


@pytest.fixture
def source() -> np.ndarray:
    return np.random.default_rng(11).standard_normal(4099).astype(np.float32)


def split(source: np.ndarray, sizes: list[int]) -> list[Tensor]:
    begins = np.cumsum([0, *sizes[:-1]])
    return [flat(size, int(begin) * 4) for size, begin in zip(sizes, begins, strict=True)]


def test_torch_loads_it_plainly_and_mapped_and_zipfile_finds_every_checksum_right(tmp_path, source):
    sizes = [1, 17, 0, 1000, 16, 64, 3001]
    path = str(tmp_path / "model.pt")
    materialise(Target([archive_of(split(source, sizes), stem="model")]), [source.tobytes()], path)
    archive = zipfile.ZipFile(path)
    assert archive.testzip() is None
    assert [name.removeprefix("model/") for name in archive.namelist()] == [
        "data.pkl", "byteorder", *(f"data/{key}" for key in range(len(sizes))), "version", ".data/serialization_id",
    ]  # fmt: skip
    assert len(archive.read("model/.data/serialization_id")) == 40
    for mapped in (False, True):
        loaded = torch.load(path, weights_only=True, mmap=mapped)
        begin = 0
        for tensor, size in zip(loaded, sizes, strict=True):
            assert np.array_equal(tensor.numpy(), source[begin : begin + size])
            begin += size


def test_a_damaged_byte_is_found_by_its_checksum(tmp_path, source):
    path = str(tmp_path / "x.pt")
    file = archive_of(split(source, [500]))
    data = bytearray(file_bytes(file, [source.tobytes()]))
    data[file.write_items[0].offset + 7] ^= 1
    with open(path, "wb") as stream:
        stream.write(data)
    assert zipfile.ZipFile(path).testzip() == "archive/data/0"


def test_data_is_aligned_and_found_by_torch_without_reading_it(tmp_path, source):
    path = str(tmp_path / "x.pt")
    file = archive_of(split(source, [3, 5, 700]), stem="x")
    materialise(Target([file]), [source.tobytes()], path)
    assert all(write_item.offset % ALIGNMENT == 0 for write_item in file.write_items)
    with FakeTensorMode():
        fakes = torch.load(path, weights_only=True)
    assert [fake.untyped_storage()._checkpoint_offset for fake in fakes] == [
        write_item.offset for write_item in file.write_items
    ]


def test_an_archive_inside_a_file_counts_offsets_from_its_own_begin(source):
    lead = os.urandom(ALIGNMENT * 3)
    inside = file_bytes(archive_of(split(source, [9, 100]), lead=lead), [source.tobytes()])
    alone = file_bytes(archive_of(split(source, [9, 100])), [source.tobytes()])
    assert inside == lead + alone


def test_more_records_than_16_bits_count(tmp_path):
    count, looked_at = 66_000, (0, 65_535, 65_999)
    path = str(tmp_path / "many.pt")
    tensors = [flat(1) for _ in looked_at]
    views = {id(t): StorageView(str(key), FLOAT, 0, (1,), (1,), 4) for t, key in zip(tensors, looked_at, strict=True)}
    file = TargetFile("")
    archive = TorchZip(file, stem="many")
    archive.pickle(dumps(list(tensors), lambda tensor: views[id(tensor)]))
    for key in range(count):
        archive.record(f"data/{key}", np.float32(key + 1).tobytes())
    archive.finish()
    materialise(Target([file]), [], path)
    assert len(zipfile.ZipFile(path).namelist()) == count + 4
    assert [float(tensor) for tensor in torch.load(path, weights_only=True)] == [key + 1.0 for key in looked_at]


def test_records_longer_and_later_than_four_gib(tmp_path):
    numel = (4 << 30) // 4 + 3
    path = str(tmp_path / "large.pt")
    file = archive_of([flat(numel), flat(5)], stem="large")
    with open(path, "wb") as stream:  # sparse: the zeros between the literals take no space
        for offset, begin, nbytes in file.literals:
            stream.seek(offset)
            stream.write(file.blob[begin : begin + nbytes])
        for write_item, marks in zip(file.write_items, (b"\0\0\x80\x3f", b"\0\0\0\x40"), strict=True):
            stream.seek(write_item.offset + write_item.nbytes - 4)
            stream.write(marks)
    sizes = {info.filename: info.file_size for info in zipfile.ZipFile(path).infolist()}
    assert (sizes["large/data/0"], sizes["large/data/1"]) == (numel * 4, 20)
    first, second = torch.load(path, weights_only=True, mmap=True)
    assert (first.numel(), float(first[-1]), float(first[0])) == (numel, 1.0, 0.0)
    assert (second.numel(), float(second[-1])) == (5, 2.0)


def one_by_one_and_at_once(sizes, stem, *cuts, lead=b"", known=()):
    """Two files of the same tensors: headers made one by one, and in the parts that end at ``cuts``."""
    tensors = [flat(size) for size in sizes]
    nbytes = np.array([tensor.nbytes for tensor in tensors], np.int64)
    files = TargetFile("a"), TargetFile("b")
    for file in files:
        file.add_literal(lead)
        archive = TorchZip(file, stem=stem)
        archive.pickle(b"pickle")
        for key, content in enumerate(known):
            archive.record(f"data/{key}", content)
        if file is files[1]:
            written = [WrittenTensor(tensor, tensor.dtype) for tensor in tensors]
            for begin, end in pairwise((0, *cuts, len(sizes))):
                headers = archive.begin_records(begin + len(known), nbytes[begin:end])
                file.add_whole_tensors(written[begin:end], headers, nbytes[begin:end])
        else:
            for key, tensor in enumerate(tensors, start=len(known)):
                archive.begin_data(str(key), tensor.nbytes)
                file.add_write_item(tensor)
        archive.finish()
    return files


@pytest.mark.parametrize("stem", ["archive", "m"])
def test_headers_that_are_made_at_once_are_those_that_are_made_one_by_one(stem):
    """Beside empty records, in a file that begins with something else, and beyond what is made in one go."""
    sizes = np.random.default_rng(3).choice([0, 1, 15, 16, 17, 300], 9000).tolist()
    one, many = one_by_one_and_at_once(sizes, stem, 4000, lead=b"lead", known=[b"known"])
    data = bytes(4 * 300)
    assert file_bytes(many, [data]) == file_bytes(one, [data])
    assert many.checksums == one.checksums
    assert many.write_items == one.write_items


def test_headers_that_are_made_at_once_beyond_four_gib():
    sizes = [3 << 28, 3 << 28, 5, 1 << 20]  # elements of four bytes: two of 3 GiB, and two that begin after 6
    one, many = one_by_one_and_at_once(sizes, "m")
    assert (many.nbytes, many.blob, many.checksums) == (one.nbytes, one.blob, one.checksums)
    assert many.literals[2:] == one.literals[1:]  # neighbours are not made one
