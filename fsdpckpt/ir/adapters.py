"""Ties the names of adapters' parameters, with and without the name of the adapter.

PEFT's live model has ``...lora_A.default.weight``. What its ``get_peft_model_state_dict`` returns, and the Trainer and
accelerate therefore save as the model, has no ``default``, and no ``modules_to_save`` either; the optimizer is saved
under the live model's names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise

_SAVED_WHOLE = "modules_to_save"
_PEFT_MODEL = "base_model.model."  # what precedes every name of a PEFT model
_REPLACED = "base_layer"  # what PEFT's layers call the one in whose place they are


def without_adapter(names: Iterable[str], like: Collection[str]) -> tuple[str, ...]:
    """``names`` without the name of the adapter, if that makes all that have it names of ``like``.

    The adapter's name stands right behind what PEFT adds to a module (``lora_A``, ``modules_to_save``). Unchanged if
    all are known, if no one segment explains the others, or if several do: then nothing says which adapter ``like`` was
    saved from.
    """
    names, known = tuple(names), frozenset(like)
    unknown = [name for name in names if name not in known]
    if not unknown or not known:
        return names
    segments = {segment for name in unknown for segment in _behind_additions(name)}
    segments -= {segment for name in known for segment in name.split(".")} | {_SAVED_WHOLE}
    explained = [found for segment in sorted(segments) if (found := _explained(segment, unknown, known)) is not None]
    if len(explained) != 1:
        return names
    changed = tuple(explained[0].get(name, name) for name in names)
    return changed if len(set(changed)) == len(set(names)) else names


def is_adapter(names: Collection[str]) -> bool:
    """Whether ``names`` are those of an adapter alone, as PEFT saves it: a live model also has the layers below it, and
    the name of the adapter behind what PEFT adds.
    """
    words = [name.split(".") for name in names]
    of_peft = bool(words) and all(name.startswith(_PEFT_MODEL) for name in names)
    if not of_peft or any(_REPLACED in each for each in words):
        return False
    last = [each[-2:] for each in words]
    return any(_ADDED.fullmatch(word) for pair in last for word in pair)


_ADDED = re.compile(
    r"(lora|ia3|hada|lokr|oft|boft|vera|pvera|poly|fourierft|vblora|hra|hira|bone|miss|trainable_tokens|shira|c3a|road|"
    r"waveft|randlora|ln_tuning|gralora|delora|tinylora|unilora|glora|osf|psoft|lily|beft|deft|adamss|frod|shadow)_\w+|"
    r"token_adapter|modules_to_save"
)
"""What PEFT's tuners call the modules and parameters that they add: the ``prefix`` of each."""


def _behind_additions(name: str) -> Iterator[str]:
    """The segments of ``name`` that may be an adapter's name."""
    for before, segment in pairwise(name.split(".")):
        if _ADDED.fullmatch(before):
            yield segment


def _explained(adapter: str, names: Iterable[str], known: Collection[str]) -> dict[str, str] | None:
    """The known name of each of ``names`` with the segment ``adapter``; None if one of them has none."""
    found = {}
    for name in names:
        words = name.split(".")
        if adapter not in words:
            continue
        if adapter not in _behind_additions(name):
            return None
        shorter = [word for word in words if word != adapter]
        forms = (".".join(shorter), ".".join(word for word in shorter if word != _SAVED_WHOLE))
        target = next((form for form in forms if form in known), None)
        if target is None:
            return None
        found[name] = target
    return found
