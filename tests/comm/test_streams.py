"""Tensors as a stream of bytes: any part, any strides, any dtype, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from fsdpckpt.comm.boxes import Stream, stream_nbytes
from fsdpckpt.errors import InternalError
from tests.comm.checks import random as random_tensor

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.float8_e5m2, torch.complex128, torch.int64, torch.uint16)


def tensors(seed: int) -> list[torch.Tensor]:
    """Contiguous and not, empty and 0-dim, of every element size."""
    made: list[torch.Tensor] = []
    for index, dtype in enumerate(DTYPES):
        whole = random_tensor(7, 6, 5, dtype=dtype, seed=seed + index)
        made += [whole, whole.transpose(0, 2), whole[1:6, ::2, 3:4], whole[2, 3, 4], whole[3:3], whole.flip(0)]
    return made


def bits(values: Sequence[torch.Tensor]) -> list[bytes]:
    return [value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for value in values]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_read_in_chunks_and_written_in_others_is_the_same_bits(seed: int) -> None:
    source, target = tensors(seed), [torch.empty_like(tensor) for tensor in tensors(seed + 50)]
    target[1] = target[1].transpose(1, 2).contiguous().transpose(1, 2)
    out, into = Stream(source), Stream(target)
    assert out.size == into.size == stream_nbytes([(tensor.shape, tensor.element_size()) for tensor in source])
    data = torch.randint(0, 256, (out.size,), dtype=torch.uint8)
    choose = random.Random(seed)
    for stream, move in ((out, out.read), (into, into.write)):
        offset = 0
        while offset < stream.size:
            count = min(16 * choose.randint(1, 90), stream.size - offset)
            move(offset, data[offset : offset + count])
            offset += count
    assert bits(target) == bits(source)


def test_a_conjugated_view_is_sent_as_the_values_it_shows() -> None:
    source = random_tensor(4, 3, dtype=torch.complex64).conj()
    stream = Stream([source])
    data = torch.empty(stream.size, dtype=torch.uint8)
    stream.read(0, data)
    assert data[: 4 * 3 * 8].numpy().tobytes() == source.resolve_conj().numpy().tobytes()


def test_a_conjugated_view_is_not_written_to() -> None:
    view = torch.zeros(4, dtype=torch.complex64).conj()
    with pytest.raises(InternalError, match="conjugated"):
        Stream([view]).write(0, torch.ones(32, dtype=torch.uint8))
