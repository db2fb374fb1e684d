"""Tells one part of a model from a whole one by what Megatron-LM and DeepSpeed record in both.

The arguments (``args``) say how the job was parallel. A file of the torch format has one rank's part; what was joined
since has the same arguments, and whole parameters, whose shapes are those that the arguments say.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from math import prod

from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.ir.values import Key, Object, Value

TO_TORCH_DIST = (
    "start the job as it was saved, with --ckpt-convert-format torch_dist --ckpt-convert-save DIR: Megatron-LM loads "
    "the checkpoint, saves it in DIR, and ends"
)
_DEEPSPEED_RANKS = "mp_world_size"
_DEEPSPEED_KEYS = frozenset({"module", "dp_world_size"})
_ARGUMENTS = "args"
_FILE = re.compile(r"(?:^|/)(?:mp_rank_\d+[^/]*/[^/]+|model_optim_rng\.pt)$")  # what one rank's is called
_TENSOR, _PIPELINE, _EXPERTS = (
    f"{kind}_model_parallel_size" for kind in ("tensor", "pipeline", "expert")
)  # fmt: skip
_OF_MEGATRON = re.compile(r"word_embeddings|linear_(?:qkv|proj|fc[12])|query_key_value|dense_(?:h_to_4h|4h_to_h)")
_WORDS = re.compile(r"(?:^|\.)(?:word_embeddings|output_layer)\.weight$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_LAYERS = re.compile(r"(?:^|\.)layers\.(?!\d)")  # of torch_dist: one tensor of all layers
EXPERT = r"experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)(?=\d+$))"  # precedes its number
_EXPERT = re.compile(rf"\.{EXPERT}(\d{{1,6}})")


def parallel_sizes(root: Mapping[Key, Value], path: str) -> dict[str, int]:
    """How the job was parallel of whose model ``root``, the content of the file ``path``, is one part; {} if it is not.

    Where a name of Megatron's or of its files is left and nothing proves that the parameters are whole, it is a part.
    """
    sizes = _recorded_sizes(root)
    if not sizes:
        return sizes
    arguments = {str(key): value for key, value in _arguments(root).items()}
    shapes = dict(_shapes({key: value for key, value in root.items() if key not in ("optimizer", _ARGUMENTS)}))
    if not any(map(_OF_MEGATRON.search, shapes)):
        return sizes if _FILE.search(path) else {}
    proofs = {_TENSOR: _words_are_whole, _PIPELINE: _layers_are_whole, _EXPERTS: _experts_are_whole}
    return {name: size for name, size in sizes.items() if not proofs[name](shapes, arguments)}


def _recorded_sizes(root: Mapping[Key, Value]) -> dict[str, int]:
    """How the job was parallel, by the arguments in ``root``: only what has several ranks."""
    arguments = _arguments(root)
    return {
        name: size
        for name in (_TENSOR, _PIPELINE, _EXPERTS)
        if isinstance(size := arguments.get(name), int) and size > 1
    }


def with_sizes_of_one(root: dict[Key, Value], sizes: Collection[str]) -> dict[Key, Value]:
    """``root`` whose arguments say 1 for each of ``sizes``; without arguments as it is."""
    found = root.get(_ARGUMENTS)
    if found is None:
        return root
    ones: dict[Key, Value] = dict.fromkeys(sizes, 1)
    state = {**_arguments(root), **ones}
    return {**root, _ARGUMENTS: replace(found, state=state) if isinstance(found, Object) else state}


def _arguments(root: Mapping[Key, Value]) -> dict[Key, Value]:
    found = root.get(_ARGUMENTS)
    state = found.state if isinstance(found, Object) else found
    return state if isinstance(state, dict) else {}


def deepspeed_ranks(root: Mapping[Key, Value]) -> int:
    """Of how many tensor-parallel ranks' module states ``root``, the content of one file, is a part; 1 for a whole one.

    DeepSpeed records it in each (``_save_checkpoint`` of ``deepspeed/runtime/engine.py``).
    """
    ranks = root.get(_DEEPSPEED_RANKS)
    return ranks if type(ranks) is int and root.keys() >= _DEEPSPEED_KEYS else 1


def _shapes(value: Value, path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names and shapes of all tensors in nested dicts."""
    if isinstance(value, Tensor):
        yield ".".join(path), value.shape
    elif isinstance(value, dict):
        for key, child in value.items():
            yield from _shapes(child, (*path, str(key)))


def _words_are_whole(shapes: Mapping[str, tuple[int, ...]], arguments: Mapping[str, object]) -> bool:
    """Whether the embeddings have all rows, which tensor parallelism divides."""
    rows = {shape[0] for name, shape in shapes.items() if _WORDS.search(name) and shape}
    return rows == {arguments.get("padded_vocab_size")}


def _layers_are_whole(shapes: Mapping[str, tuple[int, ...]], arguments: Mapping[str, object]) -> bool:
    """Whether it has all layers, which pipeline stages divide, and the embeddings before them."""
    numbers = {match[1] for name in shapes if (match := _LAYER.search(name))}
    together = {shape[0] for name, shape in shapes.items() if _LAYERS.search(name) and shape}
    words = any(map(_WORDS.search, shapes))
    return words and arguments.get("num_layers") in ({len(numbers)} if numbers else together)


def _experts_are_whole(shapes: Mapping[str, tuple[int, ...]], arguments: Mapping[str, object]) -> bool:
    """Whether the experts of a layer, which are one tensor in ``torch_dist``, are as many as the run has."""
    experts = [shape for name, shape in shapes.items() if ".experts." in name]
    numbers = [match for name in shapes if (match := _EXPERT.search(name))]
    if numbers and len(numbers) == len(experts):
        of_layer: dict[str, set[str]] = {}
        for match in numbers:
            of_layer.setdefault(match.string[: match.start(1)] + match.string[match.end(1) :], set()).add(match[1])
        return {len(found) for found in of_layer.values()} == {arguments.get("num_experts")}
    return bool(experts) and all(arguments.get("num_experts") in shape and prod(shape) for shape in experts)
