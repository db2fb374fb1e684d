"""Tensors that are rearranged without their data, against what torch makes of the data, however chunks cut them."""

from __future__ import annotations

import math
import random
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.tensors import Chunks, Tensor, contiguous_stride
from fsdpckpt.maps.boxes import Divide, Insert, Merge, Narrow, Permute, Rearranger, Select
from fsdpckpt.maps.steps import Size, rearrange
from tests.oracle.compare import identical

DATA = torch.arange(1 << 14, dtype=torch.int32)


def _cuts(extent: int, chance: random.Random) -> list[tuple[int, int]]:
    places = {0, extent, *(chance.randint(0, extent) for _ in range(chance.randint(0, 2)))}
    return list(pairwise(sorted(places)))


def stored(shape: list[int], chance: random.Random) -> tuple[Tensor, torch.Tensor]:
    """A tensor of ``shape`` somewhere in DATA, cut along any dimensions, and its values."""
    first, stride = chance.randint(0, 500), contiguous_stride(shape)
    boxes = list(product(*(_cuts(extent, chance) for extent in shape)))
    start = [[low for low, _ in box] for box in boxes]
    size = [[high - low for low, high in box] for box in boxes]
    offset = [(first + sum(map(math.prod, zip(low, stride, strict=True)))) * 4 for low in start]
    if chance.random() < 0.3:  # of a rank that got nothing
        start, size, offset = [[0] * len(shape), *start], [[0] * len(shape), *size], [0, *offset]
    rows = [0] * len(start)
    chunks = Chunks.rows(
        ndim=len(shape), rank=rows, file=rows, offset=offset, start=start, size=size, stride=[stride] * len(rows)
    )
    return Tensor(DTYPES["int32"], tuple(shape), chunks), DATA[first : first + math.prod(shape)].reshape(shape)


def values(tensor: Tensor) -> torch.Tensor:
    """The elements of ``tensor``, each of which exactly one chunk has to hold."""
    result = torch.full(tensor.shape, -1, dtype=torch.int32)
    chunks = tensor.chunks
    columns = (chunks.start.tolist(), chunks.size.tolist(), chunks.stride.tolist(), chunks.offset.tolist())
    for start, size, stride, offset in zip(*columns, strict=True):
        place = tuple(slice(low, low + extent) for low, extent in zip(start, size, strict=True))
        assert (result[place] == -1).all()
        result[place] = DATA.as_strided(size, stride, offset // 4)
    assert (result >= 0).all()
    return result


def step(
    tensor: Tensor, data: torch.Tensor, rearranger: Rearranger, chance: random.Random
) -> tuple[Tensor, torch.Tensor]:
    """One operation by chance."""
    dim = chance.randrange(data.ndim)
    extent = data.shape[dim]
    at = chance.randrange(extent)
    match chance.randint(0, 7):
        case 0:
            return rearranger.apply(tensor, Insert(dim)), data.unsqueeze(dim)
        case 1 if data.ndim > 1:
            return rearranger.apply(tensor, Select(dim, at)), data.select(dim, at)
        case 2:
            length = chance.randint(1, extent - at)
            return rearranger.apply(tensor, Narrow(dim, at, length)), data.narrow(dim, at, length)
        case 3:
            order = chance.sample(range(data.ndim), data.ndim)
            return rearranger.apply(tensor, Permute(tuple(order))), data.permute(order)
        case 4:
            inner = chance.choice([each for each in range(1, extent + 1) if extent % each == 0])
            return rearranger.apply(tensor, Divide(dim, inner)), data.unflatten(dim, (-1, inner))
        case 5 | 6 if dim + 1 < data.ndim:
            return rearranger.apply(tensor, Merge(dim, data.shape[dim + 1])), data.flatten(dim, dim + 1)
        case _ if data.numel() < 1000:
            if chance.random() < 0.5:
                return rearranger.cat([tensor, tensor], dim), torch.cat([data, data], dim)
            return rearranger.stack([tensor, tensor], dim), torch.stack([data, data], dim)
    return tensor, data


@pytest.mark.parametrize("seed", range(4))
def test_any_operations_after_each_other_give_the_elements_that_torch_gives(seed: int) -> None:
    chance, rearranger = random.Random(seed), Rearranger()
    for _ in range(60):
        tensor, data = stored([chance.choice([1, 2, 3, 4, 6, 12]) for _ in range(chance.randint(1, 3))], chance)
        for _ in range(chance.randint(1, 5)):
            tensor, data = step(tensor, data, rearranger, chance)
            assert tensor.shape == data.shape
            assert identical(values(tensor), data)


def test_tensors_that_are_cut_alike_share_their_boxes_afterwards() -> None:
    rearranger, half = Rearranger(), Size("3")
    rotary = rearrange("(h d two) i -> (h two d) i", {"two": Size("2"), "d": half})
    tensors = [
        Tensor(DTYPES["int32"], (24, 4), Chunks.whole(file=0, offset=offset, shape=(24, 4))) for offset in (0, 400)
    ]
    made = [rotary.run({(None, None): each}, rearranger, {})[None, None] for each in tensors]
    joined = [rearranger.cat([each, each], 0) for each in made]
    for first, second in (made, joined):
        assert first.chunks.boxes is second.chunks.boxes
        assert np.array_equal(second.chunks.offset, first.chunks.offset + 400)


def test_offsets_that_are_not_known_yet_stay_so() -> None:
    tensor = Tensor(DTYPES["int32"], (4, 4), Chunks.whole(file=0, offset=-1, shape=(4, 4)))
    assert Rearranger().apply(tensor, Narrow(0, 2, 2)).chunks.offset.tolist() == [-1]
