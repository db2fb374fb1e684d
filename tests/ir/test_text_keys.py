"""What DCP makes of the dicts of a state dict is noted, and undone."""

from __future__ import annotations

import json
from collections import OrderedDict
from functools import partial
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from fsdpckpt.formats.pickle.allowlist import decode_allowed
from fsdpckpt.ir.text_keys import LostDict, lost_in, restored
from tests.ir.test_frame import KEYS, same

LEAVES = st.sampled_from([1, "text", None, (1, {2: 3})])


def nested(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(KEYS, children, min_size=1, max_size=4)
    return dicts | dicts.map(OrderedDict) | st.lists(children, min_size=1, max_size=4)


TREES = st.dictionaries(KEYS, st.recursive(LEAVES, nested, max_leaves=12), max_size=4)


@settings(max_examples=60, deadline=None)
@given(TREES)
def test_what_dcp_makes_of_a_state_dict_is_undone(tree: dict[Any, Any]) -> None:
    assume(not same_texts(tree))  # nothing can be saved, or it ends inside of something else
    flat, mapping = flatten_state_dict(tree)
    lost = json.loads(json.dumps([each.to_json() for each in lost_in(tree)]))
    decode = partial(decode_allowed, file="fsdpckpt.json")
    back = restored(unflatten_state_dict(flat, mapping), [LostDict.from_json(each, decode) for each in lost])
    assert same(dict(back) if isinstance(back, dict) else back, dict(tree))


def same_texts(value: Any, at: str = "") -> bool:
    """Whether two places in ``value`` have the same dotted key, or one has that of a leaf and a dict."""
    keys: list[str] = []

    def walk(inner: Any, at: str) -> None:
        keys.append(at)
        if isinstance(inner, (dict, list)):
            for key, item in inner.items() if isinstance(inner, dict) else enumerate(inner):
                walk(item, f"{at}.{key}")

    walk(value, at)
    return len(set(keys)) < len(keys)


def test_a_record_of_something_else_changes_nothing() -> None:
    value = {"a": {"0": 1}, "b": [5]}
    lost = [LostDict(("a", "x"), (1,), ordered=True), LostDict(("b", 3), (1,), ordered=False), LostDict((0,), (), True)]
    assert restored(value, lost) == value
