"""Finds the parameters in the flat tensors of Megatron's distributed optimizer, which has them in ``distrib_optim.pt``.

For each buffer of a model's chunk the file has all float32 weights in one tensor, and each state in another: the
parameters in the reverse order of the model, each at a multiple of 64 elements from the beginning of its bucket, and
buckets one behind the other (``get_parameter_state_dp_zero`` and ``_compute_per_buffer_param_layout`` of
``megatron/core/optimizer/distrib_optimizer.py``). Where a bucket ends is not recorded: it depends on the number of
ranks and on the run's settings. The values show it: each weight rounds to the model's copy, and all elements are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from fsdpckpt.formats.torch import local_tensor
from fsdpckpt.formats.torch.tensors import StoredTensor
from fsdpckpt.ir.checkpoint import SourceFile
from fsdpckpt.ir.tensors import Tensor, contiguous_stride
from fsdpckpt.readers.megatron_torch.names import of_optimizer
from fsdpckpt.readers.same_weights import first_different
from fsdpckpt.readers.torch_ranks.rank_files import RankFile
from fsdpckpt.storage.sources import Sources

_COALESCED, _WEIGHTS, _LENGTH = "buckets_coalesced", "param", "numel_unpadded"
_ALIGNMENT = 64  # elements
_MAX_STATES = 64  # ways to place the first parameters that their values allow


@dataclass(frozen=True, slots=True)
class OptimizerElements:
    """What the optimizer has of some elements: their float32 weights, and their states by name. The elements are those
    of a whole buffer, or of one parameter in it.
    """

    weights: StoredTensor
    states: Mapping[str, StoredTensor]

    def part(self, start: int, shape: tuple[int, ...]) -> OptimizerElements:
        """What it has of the parameter of ``shape`` that begins at element ``start``."""
        states = {name: _part(state, start, shape) for name, state in self.states.items()}
        return OptimizerElements(_part(self.weights, start, shape), states)


def flat_buffers(root: object) -> list[list[OptimizerElements] | None] | None:
    """The buffers of each of the optimizers in the file with the content ``root``; None for one that another rank
    saves, and for content of another form.
    """
    found: list[list[OptimizerElements] | None] = []
    for saved in root if isinstance(root, list) else [root]:
        if saved is None:
            found.append(None)
            continue
        if not isinstance(saved, dict) or saved.get(_COALESCED) is not True:
            return None
        own: list[OptimizerElements] = []
        for number, by_dtype in sorted((key, value) for key, value in saved.items() if type(key) is int):
            if number != len(own) or not isinstance(by_dtype, dict) or len(by_dtype) != 1:
                return None
            buffer = _buffer(next(iter(by_dtype.values())))
            if buffer is None:
                return None
            own.append(buffer)
        found.append(own)
    return found


def _buffer(saved: object) -> OptimizerElements | None:
    if not isinstance(saved, dict):
        return None
    tensors: dict[str, StoredTensor] = {
        str(key): value for key, value in saved.items() if isinstance(value, StoredTensor)
    }
    length = (saved.get(_LENGTH),)
    if _WEIGHTS not in tensors or any(flat.shape != length or flat.stride != (1,) for flat in tensors.values()):
        return None
    weights = tensors.pop(_WEIGHTS)
    return OptimizerElements(weights, tensors)


@dataclass(frozen=True, slots=True)
class BufferSearch:
    """Finds the parameters of one rank in its buffers. ``model``: the file of its model; ``flat``: that of the buffers,
    both in the table of ``files``.
    """

    model: RankFile
    flat: RankFile
    files: Sequence[SourceFile]
    sources: Sources

    def parameters(
        self, optimizers: Sequence[Sequence[OptimizerElements] | None], chunks: Sequence[Mapping[str, StoredTensor]]
    ) -> dict[str, OptimizerElements] | None:
        """The parameters in the buffers of ``optimizers``; None unless there is exactly one way to place them.

        ``chunks``: the parameters of each chunk of the model.
        """
        found: dict[str, OptimizerElements] = {}
        for number, buffers in enumerate(optimizers):
            if buffers is None:
                continue
            own = [of_optimizer(chunk, number, len(optimizers)) for chunk in chunks]
            lists = [of_dtype for chunk in own for of_dtype in _by_dtype(chunk)]
            if len(lists) != len(buffers) or len(optimizers) > 2:
                return None
            for copies, buffer in zip(lists, buffers, strict=True):
                starts = self._starts(copies, buffer.weights)
                if starts is None:
                    return None
                for name, start in starts.items():
                    found[name] = buffer.part(start, copies[name].shape)
        return found

    def _starts(self, copies: Mapping[str, StoredTensor], weights: StoredTensor) -> dict[str, int] | None:
        """Where each parameter begins in ``weights``; None unless the values leave one way."""
        # By the end of the parameters so far and where their bucket begins, modulo the alignment: where they begin.
        ways: dict[tuple[int, int], list[tuple[int, ...]]] = {(0, 0): [()]}
        backwards = list(copies)[::-1]
        for name in backwards:
            copy = copies[name]
            held = local_tensor(copy, self.model.file, self.model.rank)
            more: dict[tuple[int, int], list[tuple[int, ...]]] = {}
            for (end, base), placed in ways.items():
                # It is in the same bucket, at the next multiple, or the first of a bucket that begins here.
                aligned = end + (base - end) % _ALIGNMENT
                own_bucket = [(end, end % _ALIGNMENT)] if aligned != end else []
                for start, of_bucket in [(aligned, base), *own_bucket]:
                    if self._is_at(start, weights, name, held):
                        ending = start + prod(copy.shape), of_bucket
                        more.setdefault(ending, []).extend((*way, start) for way in placed)
            ways = more
            if not ways or sum(map(len, ways.values())) > _MAX_STATES:
                return None
        complete = {way for (end, _), placed in ways.items() if end == weights.shape[0] for way in placed}
        if len(complete) != 1:
            return None
        return dict(zip(backwards, complete.pop(), strict=True))

    def _is_at(self, start: int, weights: StoredTensor, name: str, copy: Tensor) -> bool:
        """Whether the weight at element ``start`` rounds to ``copy``."""
        if start + prod(copy.shape) > weights.shape[0]:
            return False
        master = local_tensor(_part(weights, start, copy.shape), self.flat.file, self.flat.rank)
        return first_different([(name, copy, master)], self.files, self.sources) is None


def _by_dtype(copies: Mapping[str, StoredTensor]) -> list[dict[str, StoredTensor]]:
    """Every dtype of a chunk has a buffer of its own."""
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, copy in copies.items():
        found.setdefault(copy.dtype.name, {})[name] = copy
    return list(found.values())


def _part(tensor: StoredTensor, start: int, shape: tuple[int, ...]) -> StoredTensor:
    offset = tensor.offset + start * tensor.dtype.itemsize
    return StoredTensor(
        tensor.dtype, shape, contiguous_stride(shape), offset, tensor.sharded, tensor.cloned, tensor.array
    )
