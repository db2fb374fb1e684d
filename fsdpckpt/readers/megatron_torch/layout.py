"""How Megatron-core cuts the parameters of a GPT model among tensor-parallel ranks.

Nothing in the files of the torch format says it: the names are those of Megatron-core's modules, each of which cuts its
weights in one way, and the arguments of the run (``args``) have the numbers that every cut must fit. A name or a number
that is not known is refused.

``linear_qkv`` has query, key and value of one query group after the other, so that a rank's groups follow each other
(``megatron/core/transformer/attention.py``); ``linear_fc1`` of a gated MLP has the gate before the value, each cut by
itself (``megatron/core/transformer/mlp.py``), as has that of an expert (``megatron/core/transformer/moe/experts.py``).
Latent attention projects queries, keys and values up head by head, and to latents on each rank or a part of them on
each (``megatron/core/transformer/multi_latent_attention.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from fsdpckpt.readers.model_shards import ModelShard, Shape, Shards, shards_of_parts


class _Cut(Enum):
    WHOLE = auto()
    VOCABULARY = auto()
    QKV = auto()
    HEADS = auto()
    INNER = auto()
    OUTER = auto()
    OF_HEADS = auto()
    DOWN = auto()


_MLP_WIDTH, _EXPERT_WIDTH = "ffn_hidden_size", "moe_ffn_hidden_size"
_SHARED_WIDTH = "moe_shared_expert_intermediate_size"
_INTERLEAVED = "moe_mlp_glu_interleave_size"


@dataclass(frozen=True, slots=True)
class _CutRule:
    """How parameters whose names match ``pattern`` are cut. ``width``: the argument that has the width of their MLP;
    ``rows``: those that together have the rows of a projection of latent attention, or the rows of each head.
    """

    pattern: re.Pattern[str]
    cut: _Cut
    width: str = _MLP_WIDTH
    rows: tuple[str, ...] = ()


_LATENT = "multi_latent_attention"
_QUERY, _KEY_VALUE = ("qk_head_dim", "qk_pos_emb_head_dim"), ("qk_head_dim", "v_head_dim")
_LATENTS = {"q": ("q_lora_rank",), "kv": ("kv_lora_rank", "qk_pos_emb_head_dim")}
_LAYER = r"decoder\.layers\.\d+\."
_SEQUENTIAL, _GROUPED = r"experts\.local_experts\.\d+", r"experts"
_RULES = tuple(
    _CutRule(re.compile(pattern), *how)
    for pattern, *how in (
        (r"(?:embedding\.word_embeddings|output_layer)\.weight", _Cut.VOCABULARY),
        (rf"{_LAYER}self_attention\.linear_qkv\.(?:weight|bias)", _Cut.QKV),
        (rf"{_LAYER}self_attention\.linear_proj\.weight", _Cut.HEADS),
        (rf"{_LAYER}mlp\.linear_fc1\.(?:weight|bias)", _Cut.INNER),
        (rf"{_LAYER}mlp\.linear_fc2\.weight", _Cut.OUTER),
        (rf"{_LAYER}(?:self_attention\.linear_proj|mlp\.linear_fc2)\.bias", _Cut.WHOLE),
        (rf"{_LAYER}(?:self_attention\.linear_qkv|mlp\.linear_fc1)\.layer_norm_(?:weight|bias)", _Cut.WHOLE),
        (rf"{_LAYER}(?:input|pre_mlp|self_attention\.[qk])_layernorm\.(?:weight|bias)", _Cut.WHOLE),
        (r"decoder\.final_layernorm\.(?:weight|bias)", _Cut.WHOLE),
        (r"embedding\.position_embeddings\.weight", _Cut.WHOLE),
        (rf"{_LAYER}mlp\.router\.(?:weight|bias|expert_bias)", _Cut.WHOLE),
        (rf"{_LAYER}mlp\.{_SEQUENTIAL}\.linear_fc1\.(?:weight|bias)", _Cut.INNER, _EXPERT_WIDTH),
        (rf"{_LAYER}mlp\.{_SEQUENTIAL}\.linear_fc2\.weight", _Cut.OUTER, _EXPERT_WIDTH),
        (rf"{_LAYER}mlp\.{_SEQUENTIAL}\.linear_fc2\.bias", _Cut.WHOLE),
        (rf"{_LAYER}mlp\.{_GROUPED}\.linear_fc1\.(?:weight|bias)\d+", _Cut.INNER, _EXPERT_WIDTH),
        (rf"{_LAYER}mlp\.{_GROUPED}\.linear_fc2\.weight\d+", _Cut.OUTER, _EXPERT_WIDTH),
        (rf"{_LAYER}mlp\.{_GROUPED}\.linear_fc2\.bias\d+", _Cut.WHOLE),
        (rf"{_LAYER}mlp\.shared_experts\.linear_fc1\.(?:weight|bias)", _Cut.INNER, _SHARED_WIDTH),
        (rf"{_LAYER}mlp\.shared_experts\.linear_fc2\.weight", _Cut.OUTER, _SHARED_WIDTH),
        (rf"{_LAYER}mlp\.shared_experts\.(?:linear_fc2\.bias|gate_weight)", _Cut.WHOLE),
        (rf"{_LAYER}self_attention\.kv_layernorm\.(?:weight|bias)", _Cut.WHOLE),
        (rf"{_LAYER}self_attention\.linear_(?:q|kv)_up_proj\.layer_norm_(?:weight|bias)", _Cut.WHOLE),
        (rf"{_LAYER}self_attention\.linear_q_(?:up_)?proj\.weight", _Cut.OF_HEADS, "", _QUERY),
        (rf"{_LAYER}self_attention\.linear_kv_up_proj\.weight", _Cut.OF_HEADS, "", _KEY_VALUE),
        (rf"{_LAYER}self_attention\.linear_q_down_proj\.weight", _Cut.DOWN, "", _LATENTS["q"]),
        (rf"{_LAYER}self_attention\.linear_kv_down_proj\.weight", _Cut.DOWN, "", _LATENTS["kv"]),
    )
)


LAYOUT_ARGUMENTS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "num_layers", "padded_vocab_size", _MLP_WIDTH,
    "swiglu", "num_attention_heads", "num_query_groups", "group_query_attention", "kv_channels", "num_experts",
    _LATENT, *dict.fromkeys((*_QUERY, *_KEY_VALUE, *_LATENTS["q"], *_LATENTS["kv"])),
    _EXPERT_WIDTH, _SHARED_WIDTH, _INTERLEAVED, "untie_embeddings_and_output_weights",
)  # fmt: skip  # by which parameters are cut: the same on all ranks


class LayoutError(Exception):
    """Describes why nothing says how the shards of a parameter belong together."""


@dataclass(frozen=True, slots=True)
class RunArguments:
    """The arguments of a run, by name."""

    values: Mapping[str, object]

    def count(self, name: str, absent: int | None = None) -> int:
        """A number, at least 1; ``absent`` if it is not set. Raises LayoutError."""
        value = self.values.get(name)
        value = absent if value is None else value
        if type(value) is not int or value < 1:
            raise LayoutError(f"args.{name} is {value!r}"[:200])
        return value

    def flag(self, name: str) -> bool:
        """A setting that is on or off. Raises LayoutError."""
        value = self.values.get(name)
        if type(value) is not bool:
            raise LayoutError(f"args.{name} is {value!r}"[:200])
        return value

    @property
    def groups(self) -> int:
        """Query groups: as many as heads without grouped-query attention."""
        grouped = self.flag("group_query_attention")
        return self.count("num_query_groups" if grouped else "num_attention_heads")


def shards_of(name: str, local: Shape, ranks: int, arguments: RunArguments) -> Shards:
    """The shards of the parameter ``name``, of which each of ``ranks`` tensor-parallel ranks has ``local``.

    Raises LayoutError.
    """
    rule = next((rule for rule in _RULES if rule.pattern.fullmatch(name)), None)
    if rule is None:
        raise LayoutError("of which modules have such a parameter, and how they cut it, nothing is known")
    # Latents are cut, or each rank computes them: Megatron itself looks at the rows (``_qkv_down_projection``).
    duplicated = rule.cut is _Cut.DOWN and local[:1] == (_sum(rule.rows, arguments),)
    if rule.cut is _Cut.WHOLE or duplicated:
        return Shards(local, {rank: ModelShard.of_whole(local) for rank in range(ranks)})
    dim = 1 if rule.cut in (_Cut.HEADS, _Cut.OUTER) else 0
    if len(local) <= dim:
        raise LayoutError(f"it has {len(local)} dimensions")
    parts = 2 if rule.cut is _Cut.INNER and arguments.flag("swiglu") else 1
    if ranks > 1 and rule.width == _EXPERT_WIDTH and arguments.values.get(_INTERLEAVED) is not None:
        raise LayoutError(f"the rows of its gate and value are interleaved (args.{_INTERLEAVED})")
    extent = local[dim] * ranks
    expected = _extent(rule, parts, ranks, arguments)
    if extent != expected:
        raise LayoutError(f"{ranks} shards of {local[dim]} make {extent}, and args say {expected}")
    return _cut(local, dim, parts, ranks)


def _extent(rule: _CutRule, parts: int, ranks: int, arguments: RunArguments) -> int:
    """How long the arguments say the dimension is that ``rule`` cuts."""
    if rule.cut is _Cut.VOCABULARY:
        return arguments.count("padded_vocab_size")
    if rule.cut in (_Cut.INNER, _Cut.OUTER):
        of_experts = rule.width == _EXPERT_WIDTH and arguments.values.get(_EXPERT_WIDTH) is None
        return parts * arguments.count(_MLP_WIDTH if of_experts else rule.width)
    if rule.cut is _Cut.DOWN:
        return _sum(rule.rows, arguments)
    heads, latent = arguments.count("num_attention_heads"), arguments.values.get(_LATENT) is True
    if rule.cut is _Cut.OF_HEADS or (latent and rule.cut is _Cut.HEADS):
        if heads % ranks:
            raise LayoutError(f"{heads} heads are not divided among {ranks} ranks")
        return heads * _sum(rule.rows or ("v_head_dim",), arguments)
    groups = arguments.groups
    if groups % ranks or heads % groups:
        raise LayoutError(f"{groups} query groups of {heads} heads are not divided among {ranks} ranks")
    return (heads if rule.cut is _Cut.HEADS else heads + 2 * groups) * arguments.count("kv_channels")


def _sum(names: Sequence[str], arguments: RunArguments) -> int:
    return sum(map(arguments.count, names))


def _cut(local: Shape, dim: int, parts: int, ranks: int) -> Shards:
    """A tensor of ``parts`` that follow each other along ``dim``, each divided equally among ``ranks``."""
    if local[dim] % parts:
        raise LayoutError(f"{local[dim]} rows are not gate and value of one size")
    return shards_of_parts([local] * ranks, dim, [[local[dim] // parts] * ranks] * parts)
