"""Refuses a map that would part quantized weights from the tensors that say what their elements stand for."""

from __future__ import annotations

import re
from collections.abc import Collection

from fsdpckpt import flags
from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.tensors import Tensor
from fsdpckpt.maps.match import Matched
from fsdpckpt.maps.rules import LayoutMap
from fsdpckpt.text import first_lines, plural

_NAMES_IN_MESSAGE = 8
# What libraries call the tensors beside quantized weights: DeepSeek's FP8, bitsandbytes, GPTQ, AWQ, compressed-tensors.
_OF_WEIGHT = re.compile(r"\w*scale\w*|absmax|quant_map|nested_\w+|zero_point|quant_state\.\w+")
_BESIDE_WEIGHT = re.compile(r"\w*scales?|SCB|q?zeros|g_idx")
_SEPARATOR = re.compile(r"[._]")
_WIDE = 2  # bytes of a float that is no code


def require_scales(layout_map: LayoutMap, matched: Matched, checkpoint: Checkpoint) -> None:
    """Raises UsageError if a quantized weight would get another name, or other elements, and its scales would not."""
    model = checkpoint.model
    moved = [name for use in matched.uses for name in use.sources.values()]
    leaves = {name: model.params.get(name) for name in moved} if model is not None else {}
    codes = {name for name, leaf in leaves.items() if isinstance(leaf, Tensor) and _are_codes(leaf)}
    left = [(name, owner) for name in matched.rest if codes and (owner := _owner(name, codes)) is not None]
    if not left:
        return
    raise UsageError(
        f"{layout_map.name} moves quantized weights of {checkpoint.source}, and has no rule for "
        f"{plural(len(left), 'tensor')} that say what their elements stand for",
        details=first_lines([f"{name}, of {owner}" for name, owner in left], _NAMES_IN_MESSAGE),
        file=layout_map.name,
        key=left[0][0],
        why="under another name, or joined with others, the weights would be read without their scales",
        next_step=f"give the map rules for them, or convert weights that are not quantized; {flags.exclude('GLOB')} "
        "leaves tensors out",
    )


def _are_codes(tensor: Tensor) -> bool:
    return tensor.dtype.kind != "float" or tensor.dtype.itemsize < _WIDE


def _owner(name: str, codes: Collection[str]) -> str | None:
    """Which of the quantized weights ``codes`` the tensor ``name`` belongs to: ``...weight_scale_inv`` and
    ``...weight.absmax`` to ``...weight``, as ``...SCB`` beside it.
    """
    for separator in _SEPARATOR.finditer(name):
        if name[: separator.start()] in codes and _OF_WEIGHT.fullmatch(name, separator.end()):
            return name[: separator.start()]
    module, _, word = name.rpartition(".")
    if _BESIDE_WEIGHT.fullmatch(word) is None:
        return None
    return next((owner for owner in (f"{module}.weight", f"{module}.qweight") if owner in codes), None)
