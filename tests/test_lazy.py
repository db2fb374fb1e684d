"""Tensors of a lazy checkpoint: slices as numpy takes them, of which only the bytes are read."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fsdpckpt
from fsdpckpt.errors import SourceUnsupportedError
from fsdpckpt.execute.read_check import ReadCheck
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, ModelState, Origin
from fsdpckpt.ir.dtypes import DTYPES, numpy_dtype
from fsdpckpt.ir.files import Stored
from fsdpckpt.lazy import LazyCheckpoint, LazyTensor
from fsdpckpt.storage.local import MemoryFile
from fsdpckpt.verify.blocks import BLOCK_BYTES
from tests.opened_by import OpenedBy
from tests.oracle.compare import identical
from tests.verify.raw import Raw, random_array

GOLDEN = Path(__file__).parent / "golden" / "torch-2.4"
# torch cannot copy its integers of less than a byte.
COPIED = sorted(
    name for name in DTYPES if hasattr(torch, name) and name.lstrip("uint") not in {str(bits) for bits in range(1, 8)}
)


class CountedFile(MemoryFile):
    """Counts the reads and their bytes."""

    nbytes_read = reads = largest_read = 0

    def read_into(self, offset: int, target: memoryview) -> None:
        type(self).nbytes_read += len(target)
        type(self).reads += 1
        type(self).largest_read = max(self.largest_read, len(target))
        super().read_into(offset, target)


def lazy(raw: Raw, array: np.ndarray, boxes: list, **how: object) -> LazyTensor:
    tensor = raw.put(array, boxes, **how)  # type: ignore[arg-type]
    files = tuple(Stored(str(rank), len(data)) for rank, data in enumerate(raw.data))
    origin = Origin("raw", Layout.SHARDED, Container.TORCH, "plain", len(files))
    checkpoint = Checkpoint(origin, files=files, model=ModelState({"weight": tensor}), optim=None, extra={})
    sources = OpenedBy(lambda path: CountedFile(bytes(raw.data[int(path)]), path))
    return LazyCheckpoint(checkpoint, ReadCheck(checkpoint, sources))["weight"]


def grid(shape: tuple[int, ...], cuts: list[list[int]]) -> list:
    cells = product(*(list(pairwise(sorted({0, n, *cut}))) for n, cut in zip(shape, cuts, strict=True)))
    return [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]


def slices(length: int) -> st.SearchStrategy:
    ends = st.none() | st.integers(-length - 2, length + 2)
    return st.builds(slice, ends, ends, st.sampled_from([None, 1, 2, 3, length + 1]))


def one_index(length: int) -> st.SearchStrategy:
    return slices(length) | st.integers(-length, length - 1) if length else slices(length)


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> tuple:
    """Ints and slices for the first dimensions, then perhaps an ellipsis and some for the last."""
    chosen = [draw(one_index(n)) for n in shape[: draw(st.integers(0, len(shape)))]]
    if draw(st.booleans()):
        rest = shape[len(chosen) :]
        behind = draw(st.integers(0, len(rest)))
        chosen += [..., *(draw(one_index(n)) for n in rest[len(rest) - behind :])]
    return tuple(chosen)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_slices_of_slices_are_numpys_whatever_chunks_hold_the_tensor(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    dtype = data.draw(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "bool", "complex128"]))
    array = random_array(data.draw(st.integers(0, 99)), shape, dtype)
    boxes = grid(shape, [data.draw(st.lists(st.integers(0, n), max_size=2)) for n in shape])
    order = data.draw(st.permutations(range(len(shape))))
    ranks = [number % 3 for number in range(len(boxes))]
    tensor = lazy(Raw(Path(), 3), array, boxes, ranks=ranks, order=order, dtype=DTYPES[dtype])
    for _ in range(2):
        index = data.draw(indices(tensor.shape))
        tensor, array = tensor[index], array[index]
        assert (tensor.shape, tensor.nbytes) == (array.shape, array.nbytes)
        assert tensor.numpy().tobytes() == array.tobytes()


def test_an_index_counts_in_the_slice_it_is_taken_of() -> None:
    array = random_array(7, (9, 6), "float32")
    tensor = lazy(Raw(Path(), 4), array, grid((9, 6), [[4], [5]]))
    for first, second in (
        ((slice(1, None, 3),), (-1,)),
        ((slice(None, None, 2), slice(1, 6, 2)), (3, slice(1, None, 2))),
    ):
        assert tensor[first][second].numpy().tobytes() == array[first][second].tobytes()


@pytest.mark.parametrize("dtype", COPIED)
def test_a_slice_has_torchs_bytes_in_every_dtype(dtype: str) -> None:
    itemsize = DTYPES[dtype].itemsize
    content = np.random.default_rng(5).integers(0, 2 if dtype == "bool" else 256, 9 * 6 * itemsize, np.uint8)
    array = content.view(numpy_dtype(DTYPES[dtype])).reshape(9, 6)
    truth = torch.from_numpy(content).view(getattr(torch, dtype)).reshape(9, 6)
    tensor = lazy(Raw(Path(), 4), array, grid((9, 6), [[4], [5]]), dtype=DTYPES[dtype])
    for index in ((slice(3, 8), slice(None, 5)), (slice(1, None, 3), -1), (-2,), (..., slice(2, 4)), (slice(4, 4),)):
        found, expected = tensor[index].torch(), truth[index]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("source", ["f2_default/ckpt", "f1_orig_sh_dt_dcp/model", "f1_orig_full/model.pt", "flat"])
def test_slices_of_what_fsdp_saved_are_those_of_the_full_tensors(source: str, tmp_path: Path) -> None:
    directory = GOLDEN / ("f1_orig_local" if source == "flat" else Path(source).parts[0])
    truth = torch.load(directory / "truth" / "full.pt", weights_only=True)["model"]
    path = GOLDEN / source
    if source == "flat":
        path = tmp_path / "flat"
        flat = {"to": "flattened", "world_size": 3, "unit": "none", "use_orig_params": True, "only": "model"}
        fsdpckpt.convert(directory / "truth" / "full.pt", path, **flat)
    with fsdpckpt.open(path) as checkpoint:
        assert set(checkpoint.section("model")) >= set(truth)
        for name, value in truth.items():
            index = (slice(1, -1, 2), ..., -1) if value.ndim > 1 else (...,)
            assert identical(checkpoint[name][index].torch(), value[index])


def test_only_the_bytes_of_a_slice_are_read() -> None:
    array = random_array(3, (64, 4096), "float32")  # a row is 16 KiB
    tensor = lazy(Raw(Path(), 4), array, grid((64, 4096), [[30], [2048]]), dtype=DTYPES["float32"])
    for index, most in (
        ((slice(3, 7), slice(0, 5)), 4 * 16384),  # the gaps between rows are read where they are small
        ((5,), 16384),
        ((slice(0, 64, 16),), 4 * 16384),
        ((slice(4, 4),), 0),
    ):
        CountedFile.nbytes_read = 0
        found = tensor[index]
        assert CountedFile.nbytes_read == 0
        assert found.numpy().tobytes() == array[index].tobytes()
        assert CountedFile.nbytes_read <= most


def test_a_stepped_slice_takes_no_more_memory_than_its_result_and_a_block() -> None:
    array = random_array(5, (1 << 23,), "float32")
    tensor = lazy(Raw(Path(), 2), array, grid((1 << 23,), [[1 << 22]]), dtype=DTYPES["float32"])
    CountedFile.largest_read = CountedFile.reads = 0
    assert tensor[3::7].numpy().tobytes() == array[3::7].tobytes()
    assert CountedFile.largest_read <= BLOCK_BYTES and CountedFile.reads < 20
    CountedFile.reads = 0
    assert tensor[::100].numpy().tobytes() == array[::100].tobytes()
    assert CountedFile.reads < 20  # the gaps are small: no request for each element


def test_a_dtype_that_the_installed_torch_lacks_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = lazy(Raw(Path(), 1), random_array(1, (4,), "uint16"), [((0,), (4,))], dtype=DTYPES["uint16"])
    monkeypatch.delattr(torch, "uint16")
    with pytest.raises(SourceUnsupportedError, match=r"weight is uint16, a dtype that torch .* does not have"):
        tensor.torch()
    assert tensor.numpy().shape == (4,)


def test_get_does_not_search_for_the_nearest_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdpckpt.lazy._nearest", pytest.fail)
    with fsdpckpt.open(GOLDEN / "f2_default" / "truth" / "full.pt") as checkpoint:
        name = next(iter(checkpoint))
        assert checkpoint.get("nothing at all") is None and checkpoint.get("nothing at all", 3) == 3
        assert checkpoint.get(name).shape == checkpoint[name].shape  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        ((4,), IndexError, "index 4 is out of bounds for dimension 0 with size 4"),
        ((0, -4), IndexError, "index -4 is out of bounds for dimension 1 with size 3"),
        ((0, 0, 0), IndexError, "too many indices for a tensor of 2 dimensions: 3"),
        ((..., 0, ...), IndexError, "single ellipsis"),
        ((slice(None, None, -1),), ValueError, "must be 1 or more, not -1"),
        ((None,), TypeError, "an int, a slice or ..., not None"),
        ((True,), TypeError, "an int, a slice or ..., not True"),
        (([0, 1],), TypeError, r"not \[0, 1\]; read the tensor with numpy"),
    ],
)
def test_other_indices_are_refused_as_by_numpy(index: tuple, error: type[Exception], words: str) -> None:
    tensor = lazy(Raw(Path(), 1), random_array(1, (4, 3), "float32"), [((0, 0), (4, 3))])
    with pytest.raises(error, match=words):
        tensor[index]


def test_a_tensor_iterates_and_becomes_an_array_and_moves_to_a_device() -> None:
    array = random_array(1, (3, 2), "float32")
    tensor = lazy(Raw(Path(), 1), array, [((0, 0), (3, 2))])
    assert [row.numpy().tobytes() for row in tensor] == [row.tobytes() for row in array]
    assert np.asarray(tensor, np.float64).tobytes() == array.astype(np.float64).tobytes()
    assert tensor.to("meta").device.type == "meta"
    assert tensor.to(torch.float64).dtype == torch.float64
    assert repr(tensor[0]) == "LazyTensor('weight', float32, [2])"
    assert list(tensor[:0]) == []
    assert float(tensor[2, 1].numpy()) == array[2, 1]
    for lazy_or_not in (tensor[2, 1], torch.ones(()), np.ones(())):
        with pytest.raises(TypeError, match="iteration over a 0-d"):
            list(lazy_or_not)  # type: ignore[call-overload]


def test_a_missing_key_names_the_nearest_and_a_notebook_gets_a_table() -> None:
    truth = GOLDEN / "f2_default" / "truth" / "full.pt"
    with fsdpckpt.open(truth) as checkpoint:
        name = next(key for key in checkpoint if "." in key)
        for wrong in (f"model.{name}", name[:-1], name.rpartition(".")[2]):
            with pytest.raises(KeyError, match="has no tensor .*; the nearest are .*" + name):
                checkpoint[wrong]
        assert repr(checkpoint).startswith(f"<{truth}: full, torch, {len(checkpoint)} tensors, ")
        assert f"<td>{name}</td>" in checkpoint._repr_html_()
