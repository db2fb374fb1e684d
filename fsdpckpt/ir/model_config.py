"""Compares the shapes of weights with what a ``config.json`` of Hugging Face's says about them.

Compared are, each only if all weights of that name have one size:

- ``hidden_size`` (``n_embd``) with the first layer norm of each layer, and with the columns of the word embeddings;
- ``intermediate_size`` with the rows of ``mlp.gate_proj`` and ``mlp.up_proj``, and the columns of ``mlp.down_proj``;
- ``num_attention_heads`` and ``num_key_value_heads``, times ``head_dim``, with the rows of the projections;
- ``vocab_size`` with the rows of the word embeddings;
- ``num_hidden_layers`` (``n_layer``) with the numbers of the one stack of layers that there is;
- ``num_experts`` (``num_local_experts``, ``n_routed_experts``) with the experts of each layer: ``experts.0`` and so on,
  or the first dimension of a tensor of all;
- ``r`` of an ``adapter_config.json`` with the rows of ``lora_A`` and the columns of ``lora_B``.

A configuration may be older than the weights, so beside a checkpoint only what is certain counts: a vocabulary of
less than half, fewer layers, columns or heads than stated, and only numbers that stand in no other field about sizes
or layers, which may be the one that applies. Nothing is said about a vocabulary that was resized, tied embeddings,
layers that were added, adapters, towers for images or sound, and models of several stacks. ``--reference`` must fit
exactly (``disagreements``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WORD_EMBEDDINGS = re.compile(r"(^|\.)(embed_tokens|embed_in|wte|word_embeddings|tok_embeddings|embeddings)\.weight$")

_Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Size:
    """``fields`` state the size of dimension ``dim`` of the weights that ``pattern`` finds."""

    fields: tuple[str, ...]
    pattern: re.Pattern[str]
    dim: int


_SIZES = (
    _Size(("vocab_size",), WORD_EMBEDDINGS, 0),
    _Size(("hidden_size", "n_embd"), re.compile(r"\.(input_layernorm|ln_1)\.weight$"), 0),
    _Size(("intermediate_size",), re.compile(r"\.mlp\.(gate_proj|up_proj)\.weight$"), 0),
)
_COLUMNS = (
    _Size(("hidden_size", "n_embd"), WORD_EMBEDDINGS, 1),
    _Size(("intermediate_size",), re.compile(r"\.mlp\.down_proj\.weight$"), 1),
)
_HEADS = (
    ("num_attention_heads", re.compile(r"\.self_attn\.q_proj\.weight$")),
    ("num_key_value_heads", re.compile(r"\.self_attn\.[kv]_proj\.weight$")),
)
# Heads of other sizes in some layers, or whose size stands elsewhere.
_OTHER_HEADS = frozenset(
    {"block_configs", "global_head_dim", "kv_channels", "attention_head_size", "d_kv", "qk_nope_head_dim", "head_size"}
)
_DEPTH = ("num_hidden_layers", "n_layer")
_LAYER = re.compile(r"^(.*?\b(?:layers|layer|h))\.(\d+)\.")
_EXPERT_COUNTS = ("num_local_experts", "n_routed_experts", "num_experts")
_EXPERT = re.compile(r"^(.*?\bexperts)\.(\d+)\.")
_ALL_EXPERTS = re.compile(r"^(.*?\bexperts)\.(gate_up_proj|down_proj|gate_proj|up_proj)$")
_OTHER_INPUT = re.compile(r"vision|visual|image|audio|speech")  # a part of the model with a configuration of its own
_OF_IMAGES = frozenset({"patch_size", "image_size"})
_USED_AGAIN = re.compile(r"recur|loop|share|unique|repeat")  # in the names of fields: layers that run several times
_OF_SIZES = re.compile(r"size|dim|emb|width")  # in the names of fields
_LORA = re.compile(r"\.lora_([AB])\.(?:[^.]+\.)?weight$")


@dataclass(frozen=True, slots=True)
class Disagreement:
    """``field`` is ``stated``, and the weights have ``found``: ``what`` of the weight ``name``.

    ``certain``: that training changed it, or that the configuration is older, does not explain it. ``counts_layers``:
    whether it is a number of layers or experts, of which ``name`` is in one, and not a size of that weight.
    """

    field: str
    stated: int
    found: int
    what: str
    name: str
    certain: bool
    counts_layers: bool = False


def certain_disagreements(fields: Mapping[str, object], shapes: _Shapes) -> list[Disagreement]:
    """Everything in which ``fields``, of a ``config.json``, and the weights of these ``shapes`` differ for certain."""
    text = fields.get("text_config")
    if isinstance(text, dict):  # what it leaves out has its default, whatever the outer configuration says
        fields = text
    # An adapter alone, or beside a base that is left out; a model for images.
    if any(_LORA.search(name) for name in shapes) or not _OF_IMAGES.isdisjoint(fields):
        return []
    shapes = {name: shape for name, shape in shapes.items() if not _OTHER_INPUT.search(name)}
    sizes = {value for field, value in fields.items() if type(value) is int and _OF_SIZES.search(field)}
    depths = {value for field, value in fields.items() if type(value) is int and "layer" in field}
    found = [*_sizes(fields, shapes), *_parts(fields, shapes), *_heads(fields, shapes)]
    certain = [each for each in found if each.certain and each.found not in sizes]
    layers = (each for each in _depth(fields, shapes) if each.certain and each.found not in depths)
    return [*certain, *layers, *_experts(fields, shapes)]


def disagreements(fields: Mapping[str, object], shapes: _Shapes) -> list[Disagreement]:
    """The fields with which ``from_pretrained`` would not load weights of these ``shapes``, whatever the cause."""
    return [*_sizes(fields, shapes), *_depth(fields, shapes)]


def _sizes(fields: Mapping[str, object], shapes: _Shapes) -> Iterator[Disagreement]:
    for size in _SIZES:
        found = _one_size(shapes, size.pattern, size.dim)
        for field in size.fields:
            stated = fields.get(field)
            if found is not None and type(stated) is int and stated != found[1]:
                resized = field == "vocab_size" and 2 * found[1] > stated  # a part of it has at most half
                yield Disagreement(field, stated, found[1], f"the rows of {found[0]}", found[0], certain=not resized)


def _parts(fields: Mapping[str, object], shapes: _Shapes) -> Iterator[Disagreement]:
    """Columns of which there are fewer than ``fields`` state."""
    for size in _COLUMNS:
        found = _one_size(shapes, size.pattern, size.dim)
        for field in size.fields:
            stated = fields.get(field)
            if found is not None and type(stated) is int and found[1] < stated:
                yield Disagreement(field, stated, found[1], f"the columns of {found[0]}", found[0], certain=True)


def _one_size(shapes: _Shapes, pattern: re.Pattern[str], dim: int) -> tuple[str, int] | None:
    """A weight that ``pattern`` finds, and its size; None if these weights have several sizes."""
    sizes = {shape[dim]: name for name, shape in shapes.items() if len(shape) > dim and pattern.search(name)}
    if len(sizes) != 1:
        return None
    ((size, name),) = sizes.items()
    return name, size


def _heads(fields: Mapping[str, object], shapes: _Shapes) -> Iterator[Disagreement]:
    """Projections with fewer rows than there are heads, of which all heads are a multiple: a part of the heads."""
    hidden, heads, dim = (fields.get(field) for field in ("hidden_size", "num_attention_heads", "head_dim"))
    if dim is None and type(hidden) is int and type(heads) is int and heads > 0:
        dim = hidden // heads
    if type(dim) is not int or not _OTHER_HEADS.isdisjoint(fields):
        return
    for field, pattern in _HEADS:
        stated, found = fields.get(field), _one_size(shapes, pattern, 0)
        if type(stated) is not int or found is None:
            continue
        name, rows = found
        if 0 < rows < stated * dim and stated * dim % rows == 0:
            yield Disagreement(field, stated * dim, rows, f"the rows of {name}", name, certain=True)


def _depth(fields: Mapping[str, object], shapes: _Shapes) -> Iterator[Disagreement]:
    stacks: dict[str, dict[int, str]] = {}
    for name in shapes:
        match = _LAYER.match(name)
        if match is not None:
            stacks.setdefault(match[1], {}).setdefault(int(match[2]), name)
    if len(stacks) != 1:
        return
    ((stack, numbers),) = stacks.items()
    used_again = any(_USED_AGAIN.search(field) for field in fields)
    more = fields.get("num_nextn_predict_layers")  # of DeepSeek: they are numbered after the others
    for field in _DEPTH:
        stated = fields.get(field)
        if type(stated) is not int:
            continue
        with_more = stated + more if type(more) is int else stated
        if len(numbers) not in (stated, with_more):
            certain = len(numbers) < stated and not used_again
            name = next(iter(numbers.values()))
            yield Disagreement(field, stated, len(numbers), f"the number of {stack}", name, certain, counts_layers=True)


def _experts(fields: Mapping[str, object], shapes: _Shapes) -> Iterator[Disagreement]:
    """The first layer with fewer experts than ``fields`` state. A list of numbers, one for each layer, says nothing."""
    numbers: dict[str, dict[int, str]] = {}
    fused: dict[str, tuple[int, str]] = {}
    for name, shape in shapes.items():
        if match := _EXPERT.match(name):
            numbers.setdefault(match[1], {}).setdefault(int(match[2]), name)
        elif (match := _ALL_EXPERTS.match(name)) and len(shape) == 3:
            fused.setdefault(match[1], (shape[0], name))
    counts = {above: (len(found), next(iter(found.values()))) for above, found in numbers.items()} | fused
    stated_anywhere = {fields[field] for field in _EXPERT_COUNTS if type(fields.get(field)) is int}
    # Of several fields one may be a default that this model does not use.
    counts = {above: found for above, found in counts.items() if found[0] not in stated_anywhere}
    for field in _EXPERT_COUNTS:
        stated = fields.get(field)
        if type(stated) is not int:
            continue
        for above, (count, name) in counts.items():
            if count < stated:
                what = f"the number of {above}"
                yield Disagreement(field, stated, count, what, name, certain=True, counts_layers=True)
                return


def adapter_disagreements(fields: Mapping[str, object], shapes: _Shapes) -> list[Disagreement]:
    """Adapters of another rank than ``fields``, of an ``adapter_config.json``, say: none is a multiple of its ``r``.

    Adapters of experts are several of one rank, one after the other.
    """
    pattern = fields.get("rank_pattern")
    ranks = _positive((fields.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())))
    found: list[Disagreement] = []
    for name, shape in shapes.items():
        match = _LORA.search(name)
        if match is None or len(shape) != 2 or not ranks:
            continue
        dim = 0 if match[1] == "A" else 1
        if all(shape[dim] % rank for rank in ranks):
            what = f"the {'columns' if dim else 'rows'} of {name}"
            found.append(Disagreement("r", ranks[0], shape[dim], what, name, certain=True))
    return found


def _positive(values: Iterable[object]) -> list[int]:
    return [value for value in values if type(value) is int and value > 0]
