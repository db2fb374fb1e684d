"""The file of a map: what is no map is refused with the rule that is wrong, before anything is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpckpt.errors import SourceMissingError, UsageError
from fsdpckpt.maps import map_names, named_map, parse_map, read_map

RULE = {"from": "a.{x}", "to": "b.{x}"}


def document(**changed: Any) -> dict[str, Any]:
    return {"format": 1, "rest": "keep", "rule": [RULE], **changed}


def rule(**changed: Any) -> dict[str, Any]:
    return document(rule=[RULE, {**RULE, **changed}])


STACK = {"from": "a.{x}.{n}", "to": "b.{x}", "steps": [{"stack": "n"}]}

REFUSED = {
    "format": (document(format=2), "format is not known"),
    "no format": ({"rest": "keep", "rule": [RULE]}, "format is not known"),
    "rest": ({"format": 1, "rule": [RULE]}, "no rule names"),
    "no rule": (document(rule=[]), "no rule"),
    "odd key": (document(rules=[]), "'rules'"),
    "odd key of a rule": (rule(then="b"), "rule 2: it has 'then'"),
    "no table": (document(rule=["a"]), "rule 1: it is no table"),
    "no pattern": (rule(to=[]), "rule 2: to is no pattern"),
    "brace": (rule(to="b.{x"), "has a brace"),
    "plus nothing": (rule(to="b.{x+0}"), "has a brace"),
    "times one": (rule(**{"from": "a.{x}.{y}", "to": "b.{x*1+y}"}), "has a brace"),
    "times nothing": (rule(**{"from": "a.{x}.{y}", "to": "b.{x*0+y}"}), "has a brace"),
    "sum of three": (rule(**{"from": "a.{x}.{y}", "to": "b.{x*2+y+1}"}), "has a brace"),
    "number that is lost": (rule(to="b.{x*2+y}"), "{y} is only in to"),
    "numbers twice": (rule(to="b.{x*2+x}"), "{x} twice"),
    "stack from below": (
        rule(**{"from": "a.{x}.{n-1}", "to": "b.{x}", "steps": [{"stack": "n"}]}), "{n} counts from 0, and a.{x}.{n-1}"
    ),
    "place twice": (rule(**{"from": "a.{x}.{x}"}), "{x} twice"),
    "pattern twice": (rule(**{"from": ["a.{x}", "a.{x}"]}), "from has a pattern twice"),
    "place that is lost": (rule(**{"from": "a.{x}.{y}"}), "{y} is only in from"),
    "place from nowhere": (rule(to="b.{x}.{y}"), "{y} is only in to"),
    "different places": (rule(**{"from": ["a.{x}", "c"], "to": ["b.{x}", "d"]}), "different names in braces"),
    "count": (rule(to=["b.{x}", "c.{x}"]), "its steps make 1 of 1 tensors, and to has 2 patterns"),
    "join of one": (rule(steps=[{"cat": 0, "sizes": [1, 1]}]), "nothing to join"),
    "sizes": (rule(**{"from": ["a.{x}", "c.{x}"], "steps": [{"cat": 0, "sizes": [1, 2, 3]}]}), "2 tensors and 3 sizes"),
    "split of two": (
        rule(**{"from": ["a.{x}", "c.{x}"], "to": ["b.{x}", "d.{x}"], "steps": [{"split": 0}]}),
        "only one can be split",
    ),
    "stack of nothing": (rule(steps=[{"stack": "n"}]), "{n} is not in from"),
    "stack that stays": (rule(**{**STACK, "to": "b.{x}.{n}"}), "{n} is only in to"),
    "stack twice": (rule(**{**STACK, "steps": [{"stack": "n"}, {"stack": "n"}]}), "twice"),
    "step": (rule(steps=[{"flip": 0}]), "a step is not known"),
    "odd key of a step": (rule(steps=[{"transpose": [0, 1], "dim": 1}]), "transpose has 'dim'"),
    "dimension": (rule(steps=[{"transpose": [0, -1]}]), "a dimension is a number from 0 on"),
    "dimensions": (rule(steps=[{"transpose": [0]}]), "two dimensions"),
    "axes": (rule(steps=[{"rearrange": "a b -> a c"}]), "both sides need the same axes"),
    "arrow": (rule(steps=[{"rearrange": "a b"}]), "no ->"),
    "open axes": (rule(steps=[{"rearrange": "(a b) c -> (b a) c"}]), "leaves the sizes of a and b open"),
    "no axis": (rule(steps=[{"rearrange": "a b -> b a", "axes": {"c": 2}}]), "no axis c"),
    "odd axis": (rule(steps=[{"rearrange": "a 2 -> 2 a"}]), "'2' is no axis"),
    "value": (rule(steps=[{"rearrange": "(a b) -> (b a)", "axes": {"a": "heads"}}]), "heads is no value of the map"),
    "size": (rule(steps=[{"rearrange": "(a b) -> (b a)", "axes": {"a": "2 + 2"}}]), "is no number"),
    "zero": (rule(steps=[{"rearrange": "(a b) -> (b a)", "axes": {"a": 0}}]), "a size is a number from 1 on"),
    "value that is none": (document(values={"n": 1.5}), "value n: it is neither a number"),
    "optional": (rule(optional=1), "optional is true or false"),
    "tie": (rule(tie=True), "tie takes several patterns in from"),
    "tie with steps": (rule(**{"from": ["a.{x}", "c.{x}"], "tie": True, "steps": [{"cat": 0}]}), "no steps beside it"),
    "tie and untie": (rule(tie=True, untie=True), "tie and untie"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_map_is_refused_and_the_rule_is_named(case: str) -> None:
    written, what = REFUSED[case]
    with pytest.raises(UsageError) as error:
        parse_map(json.dumps(written).encode(), "my.json")
    assert what in error.value.what and error.value.file == "my.json"
    assert "docs/maps.md" in str(error.value.next_step)


@pytest.mark.parametrize("data", [b"\xff", b"rest = ", b"[" * 100_000, b"x" * (2 << 20)], ids=repr)
@pytest.mark.parametrize("name", ["my.toml", "my.json"])
def test_what_is_no_toml_or_json_is_refused(data: bytes, name: str) -> None:
    with pytest.raises(UsageError, match=r"my\.(toml|json): it "):
        parse_map(data, name)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceMissingError, match=r"absent\.toml"):
        read_map(str(tmp_path / "absent.toml"))


def test_the_same_map_in_toml_and_json() -> None:
    toml = (
        b'format = 1\nrest = "keep"\n[[rule]]\nfrom = "a.{x}.{n}"\nto = "b.{x}"\nsteps = [{ stack = "n", dim = 1 }]\n'
    )
    written = document(rule=[{**STACK, "steps": [{"stack": "n", "dim": 1}]}])
    first, second = parse_map(toml, "m.toml"), parse_map(json.dumps(written).encode(), "m.json")
    assert first.rules == second.rules and first.sha256 != second.sha256


@pytest.mark.parametrize("name", map_names())
def test_a_built_in_map_and_the_inverse_of_its_inverse_are_one(name: str) -> None:
    built_in = named_map(name)
    assert built_in.description and built_in.inverse().inverse() == built_in
    assert built_in.inverse().inverted and built_in.inverse().rules != built_in.rules
