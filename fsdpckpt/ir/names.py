"""Handles fully qualified names of parameters and modules, as they are in ``state_dict`` keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile

from fsdpckpt.ir.checkpoint import Checkpoint, Container

# FSDP1, checkpoint_wrapper and offload_wrapper, torch.compile, FSDP of torch 1.11 and of fairscale
FSDP_WRAPPER = "_fsdp_wrapped_module"
WRAPPERS = frozenset({FSDP_WRAPPER, "_checkpoint_wrapped_module", "_orig_mod", "_fpw_module"})


def clean(name: str) -> str:
    """``name`` without wrapper segments: ``_fsdp_wrapped_module.l.0._orig_mod.weight`` is ``l.0.weight``."""
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)


def without_fsdp(name: str) -> str:
    """``name`` without FSDP1's wrapper segments, and with those of all others."""
    return ".".join(segment for segment in name.split(".") if segment != FSDP_WRAPPER)


def joined(prefix: str, name: str) -> str:
    """The FQN of ``name`` in the module ``prefix``, "" for the root."""
    return f"{prefix}.{name}" if prefix else name


_COMPILED = "_orig_mod."
DISTRIBUTED = "module."  # DistributedDataParallel, DataParallel


def without_module(names: Iterable[str], like: Collection[str]) -> tuple[str, ...]:
    """``names`` without a leading ``module.`` if all of them have it and none of ``like`` has."""
    names = tuple(names)
    if names and all(map(is_in_module, names)) and not any(map(is_in_module, like)):
        return tuple(name.removeprefix(DISTRIBUTED) for name in names)
    return names


def is_in_module(name: str) -> bool:
    return name.startswith(DISTRIBUTED)


def keeps_order(checkpoint: Checkpoint, names: Sequence[str]) -> bool:
    """Whether the model section of ``checkpoint``, whose parameters are ``names``, is in the order of a state dict."""
    if not checkpoint.origin.keys_in_order or checkpoint.container is Container.SAFETENSORS:
        return False
    return not sorted_by_a_tool(names)


def revisits_a_module(names: Iterable[str]) -> bool:
    """Whether a module has names in two places, which ``Module.state_dict`` does not do: it lists a module's own
    tensors, then one child after the other."""
    path: list[str] = []
    left: set[tuple[str, ...]] = set()  # modules that the names have left
    for name in names:
        *module, _ = name.split(".")
        shared = next((depth for depth, (a, b) in enumerate(zip(path, module, strict=False)) if a != b), None)
        shared = min(len(path), len(module)) if shared is None else shared
        if len(path) > shared == len(module):
            return True  # a module's own tensor after a child's
        left.update(tuple(path[:depth]) for depth in range(shared + 1, len(path) + 1))
        if any(tuple(module[:depth]) in left for depth in range(shared + 1, len(module) + 1)):
            return True
        path = module
    return False


def sorted_by_a_tool(names: Sequence[str]) -> bool:
    """Whether the names are in alphabetical order where a model's own order would show: ``bias`` before its
    ``weight``, or number 10 before number 2."""
    if list(names) != sorted(names):
        return False
    all_names = set(names)
    if any(name.endswith(".bias") and name[:-4] + "weight" in all_names for name in names):
        return True
    numbered = False  # whether some number has several digits: only then the two orders differ
    natural: list[list[tuple[int, str]]] = []  # what sorts numbers by value
    for name in names:
        words = name.split(".")
        natural.append([(len(word) if word.isdigit() else 0, word) for word in words])
        numbered = numbered or any(word.isdigit() and len(word) > 1 for word in words)
    return numbered and natural != sorted(natural)


def leading_wrapper(names: Iterable[str]) -> str:
    """``_orig_mod.`` if all of ``names`` begin with it: those of a compiled model, whose flat parameters do too."""
    names = list(names)
    return _COMPILED if names and all(name.startswith(_COMPILED) for name in names) else ""


def respelled(other: str, name: str, new: str) -> str:
    """``other``, another spelling of the parameter ``name`` (with other wrappers, ``module.`` or an adapter's name), as
    it is once ``name`` has become ``new``. Unchanged if it is no spelling of ``name``.

    ``_orig_mod.layers.0.weight`` becomes ``_orig_mod.blocks.0.weight`` if ``layers.0.weight`` becomes
    ``blocks.0.weight``, and the other way round.
    """
    old_words, new_words, other_words = name.split("."), new.split("."), other.split(".")
    places = _shared_words(old_words, other_words)
    if places is None:
        return other
    before = equal_at_start(old_words, new_words)
    after = equal_at_start(old_words[before:][::-1], new_words[before:][::-1])
    replaced = range(before, len(old_words) - after)
    between = [word for word in new_words[before : len(new_words) - after] if word not in WRAPPERS]
    gone = [places[index] for index in replaced if index in places]
    following = [place for index, place in places.items() if index >= before]
    if not gone and not between:
        return other
    start = min(gone or following, default=len(other_words))
    end = max(gone, default=start - 1) + 1
    kept = [word for place, word in enumerate(other_words) if start <= place < end and place not in gone]
    return ".".join((*other_words[:start], *between, *kept, *other_words[end:]))


def _shared_words(words: Sequence[str], others: Sequence[str]) -> dict[int, int] | None:
    """The places of ``words`` in ``others`` of those words that both spellings have: all words of one of them, from the
    last on. None if both have a word that the other lacks, wrappers apart.
    """
    shorter, longer = sorted((words, others), key=lambda each: sum(word not in WRAPPERS for word in each))
    pairs: list[tuple[int, int]] = []
    at = len(longer)
    for index in range(len(shorter) - 1, -1, -1):
        if shorter[index] in WRAPPERS:
            continue
        at = next((place for place in range(at - 1, -1, -1) if longer[place] == shorter[index]), -1)
        if at < 0:
            return None
        pairs.append((index, at))
    ordered = reversed(pairs)
    return dict(ordered) if shorter is words else {place: index for index, place in ordered}


def equal_at_start(items: Iterable[object], others: Iterable[object]) -> int:
    """How many items both begin with: words or characters of a name, keys of a path."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(items, others, strict=False)))


def leading_wrappers(name: str) -> str:
    """The wrappers that ``name`` begins with, each with its dot."""
    words = list(takewhile(WRAPPERS.__contains__, name.split(".")))
    return "".join(f"{word}." for word in words)
