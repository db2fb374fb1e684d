"""Units files: the round trip is the identity, and every way to be wrong is found, named and placed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from fsdpckpt.errors import SourceCorruptError, SourceError, SourceUnrecognisedError, SourceUnsupportedError
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.unit_lists import flaws, units_of_lists
from fsdpckpt.ir.units import RankOrder, Strategy, Unit, Units
from fsdpckpt.ir.units_json import MAX_BYTES, VERSION, decode, encode, loads, render
from tests.ir.relisted import relisted
from tests.ir.units_strategy import any_units

F32, BF16 = DTYPES["float32"], DTYPES["bfloat16"]
EXAMPLE = units_of_lists(
    units=(
        Unit("", (Parameter("e.weight", (17, 9), F32), Parameter("h.bias", (3,), F32)), Strategy.FULL_SHARD, BF16),
        Unit("l.0", (Parameter("l.0.c.weight", (2, 4, 5, 3), F32, (60, 1, 12, 4), False),), Strategy.NO_SHARD),
    ),
    use_orig_params=True,
    parameters=("e.weight", "l.0.c.weight", "free", "h.bias"),
    unmanaged=(Parameter("free", (7,), BF16),),
    shared=(("h.weight", "e.weight"),),
    groups=(("h.bias", "free"), ("e.weight",)),
    world_size=5,
)


@settings(max_examples=150, deadline=None)
@given(any_units())
def test_what_was_written_is_read_back(units: Units) -> None:
    assert flaws(units) == []
    assert decode(encode(units), source="units.json") == units
    text = render(encode(units, how=["from a checkpoint"]))
    assert loads(text.encode(), source="units.json") == units
    assert json.loads(text) == encode(units, how=["from a checkpoint"])


def test_a_units_file_is_for_people_too() -> None:
    lines = render(encode(EXAMPLE)).splitlines()
    assert '    {"name": "e.weight", "shape": [17, 9], "dtype": "float32"},' in lines
    assert ' "format": "fsdpckpt-units",' in lines
    stride = '{"name": "l.0.c.weight", "shape": [2, 4, 5, 3], "dtype": "float32", "stride": [60, 1, 12, 4], '
    assert f'    {stride}"requires_grad": false}}' in lines
    assert max(map(len, lines)) < 140


def wrong(change: Callable[[Any], object]) -> SourceCorruptError:
    document = copy.deepcopy(encode(EXAMPLE))
    change(document)
    with pytest.raises(SourceCorruptError) as error:
        decode(document, source="runs/units.json")
    assert error.value.exit_code == 3
    assert error.value.file == "runs/units.json"
    assert "runs/units.json" in error.value.what
    return error.value


def setting(*path: str | int, to: object) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = to

    return change


PARAM = ("units", 0, "params", 0)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("use_orig_params",), 1),
        (("use_orig_params",), None),
        (("world_size",), 0),
        (("world_size",), True),
        (("world_size",), 2.0),
        (("shard_size",), "2"),
        (("shard_size",), 10**30),
        (("units",), {}),
        (("units", 1), []),
        (("units", 1, "prefix"), 3),
        (("units", 1, "strategy"), "FULL_SHARD"),
        (("units", 1, "param_dtype"), "torch.float32"),
        (("units", 1, "params"), None),
        ((*PARAM, "name"), None),
        ((*PARAM, "shape"), [17, -9]),
        ((*PARAM, "shape"), [17, 9.0]),
        ((*PARAM, "shape"), [2**40, 2**40]),
        ((*PARAM, "shape"), "17x9"),
        ((*PARAM, "dtype"), "float33"),
        ((*PARAM, "dtype"), ["float32"]),
        ((*PARAM, "stride"), [True, 1]),
        ((*PARAM, "requires_grad"), "no"),
        (("unmanaged", 0, "dtype"), None),
        (("shared", 0), ["h.weight"]),
        (("shared", 0), ["h.weight", 1]),
        (("parameters",), "e.weight"),
        (("parameters", 1), 1),
        (("groups", 0), {}),
        (("groups",), 7),
        (("program",), 0),
        (("how",), "guessed"),
    ],
)
def test_a_field_of_another_type_is_named(path: tuple[str | int, ...], value: object) -> None:
    error = wrong(setting(*path, to=value))
    place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).lstrip(".")
    assert error.key is not None
    assert place.startswith(error.key)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        *(
            (lambda document, name=name: document.pop(name), name)
            for name in ("units", "use_orig_params", "unmanaged", "shared", "parameters")
        ),
        (setting("units", 0, "params", 1, "require_grad", to=False), "units[0].params[1].require_grad"),
        (setting("wolrd_size", to=4), "wolrd_size"),
        *((setting("version", to=version), "version") for version in (None, "1", 0, True)),
    ],
)
def test_a_field_left_out_or_misspelt_is_named(change: Callable[[Any], object], key: str) -> None:
    assert wrong(change).key == key


def test_all_wrong_fields_are_listed() -> None:
    def change(document: Any) -> None:
        document["units"][0]["params"][0]["shape"] = None
        document["units"][1]["strategy"] = "none"
        document["world_size"] = -1

    error = wrong(change)
    assert [detail.partition(":")[0] for detail in error.details] == [
        "units[0].params[0].shape",
        "units[1].strategy",
        "world_size",
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (setting(*PARAM, "name", to="h.bias"), "parameter h.bias is listed 2 times"),
        (setting("parameters", 0, to="h.bias"), "parameters: e.weight is missing"),
        (setting("parameters", 0, to="other"), "other is in no unit"),
        (setting("units", 1, "prefix", to="l.1"), "l.0.c.weight is outside it"),
        (setting("units", 1, "prefix", to=""), "the root unit is listed 2 times"),
        (setting("units", 1, "params", to=[]), "unit 'l.0' has no parameters"),
        (setting(*PARAM, "dtype", to="bfloat16"), "one dtype"),
        (setting("groups", 0, 0, to="l.0._flat_param"), "l.0._flat_param is not a parameter"),
        (setting("groups", 1, 0, to="free"), "free is listed 2 times"),
        (setting("shared", 0, 1, to="gone"), "gone, whose other name is h.weight"),
        (setting("shared", 0, 0, to="h.bias"), "h.bias is another name of e.weight"),
        (setting("shard_size", to=2), "cannot be divided into sharding groups"),
        (setting("units", 1, "params", 0, "stride", to=[60, 1, 12]), "3 strides for 4 dimensions"),
        (setting("units", 1, "params", 0, "stride", to=[60, 1, 12, 8]), "leave gaps"),
        (setting("units", 1, "params", 0, "stride", to=[0, 0, 0, 0]), "leave gaps"),
    ],
)
def test_fields_that_contradict_each_other_are_told(change: Callable[[Any], object], said: str) -> None:
    error = wrong(change)
    assert any(said in text for text in (error.what, *error.details))


def test_the_strides_of_a_large_channels_last_parameter_are_read() -> None:
    shape, stride = (8192, 16384, 3, 3, 3), (442368, 1, 147456, 49152, 16384)
    param = Parameter("conv.weight", shape, DTYPES["float32"], stride=stride)
    units = units_of_lists((Unit("", (param,)),), ("conv.weight",), use_orig_params=True)
    assert decode(encode(units), source="x") == units


def test_flat_parameters_are_the_keys_of_groups_without_original_parameters() -> None:
    document: Any = encode(EXAMPLE)
    document["use_orig_params"] = False
    document["groups"] = [["l.0._flat_param", "free"], ["_flat_param"]]
    assert decode(document, source="x").groups == (("l.0._flat_param", "free"), ("_flat_param",))
    document["groups"][0].append("e.weight")
    with pytest.raises(SourceCorruptError, match=r"e\.weight is not a flat parameter"):
        decode(document, source="x")
    document["groups"] = None
    document["units"][0]["params"][0]["requires_grad"] = False
    with pytest.raises(SourceCorruptError, match=r"only one of e\.weight and h\.bias requires gradients"):
        decode(document, source="x")


def test_orders_of_ranks_are_version_2_and_checked_against_the_groups() -> None:
    orders = (RankOrder((1, 4), (("free", "h.bias"), ())), RankOrder((2,), (("h.bias",), ("e.weight",))))
    units = relisted(EXAMPLE, orders=orders)
    document = encode(units)
    assert (encode(EXAMPLE)["version"], document["version"]) == (1, 2)
    assert "orders" not in encode(EXAMPLE)
    assert decode(document, source="x") == units
    assert [units.groups_of(rank) for rank in (0, 1, 2)] == [EXAMPLE.groups, orders[0].groups, orders[1].groups]
    for ranks, groups in (
        ([5], [["free"], []]),
        ([1], [["free"], []]),
        ([0], [["free"]]),
        ([0], [["free", "free"], []]),
        ([0], [["e.weight"], []]),
        ([-1], [["free"], []]),
        (0, [["free"], []]),
    ):
        wrong(lambda it, o={"ranks": ranks, "groups": groups}: it.update(orders=[*document["orders"][:1], o]))


OTHER_DOCUMENTS = [b"{}", b"[]", b"null", b"7", b'"fsdpckpt-units"', b'{"format": "units"}', b'{"format": ["x"]}']


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"\xff\xfe", b"\x80\x02}q\x00.", b"[" * 200_000, b'{"a":' * 100_000, b"9" * 5000,
        b'{"format": "fsdpckpt-units", "format": "fsdpckpt-units"}', b"[" * (MAX_BYTES + 1),
        render(encode(EXAMPLE)).encode()[:-30],
        render(encode(EXAMPLE)).replace('"world_size": 5', '"world_size": NaN').encode(),
        json.dumps(encode(EXAMPLE) | {"version": VERSION + 1}).encode(),
        *OTHER_DOCUMENTS,
    ],
    ids=lambda data: repr(data[:20]),
)  # fmt: skip
def test_what_are_no_units_is_refused_for_what_it_is(data: bytes) -> None:
    with pytest.raises(SourceError) as error:
        loads(data, source="runs/units.json")
    assert error.value.file == "runs/units.json"
    assert (f'"version": {VERSION + 1}'.encode() in data) is isinstance(error.value, SourceUnsupportedError)
    assert len(data) <= MAX_BYTES or "larger than a units file can be" in error.value.what
    assert b"NaN" not in data or error.value.key == "world_size"
    if data in OTHER_DOCUMENTS:
        assert isinstance(error.value, SourceUnrecognisedError) and error.value.key == "format"


def test_a_file_in_which_all_is_wrong_is_given_up_soon() -> None:
    with pytest.raises(SourceCorruptError, match="1000 of its fields are wrong, and more") as error:
        decode({**encode(EXAMPLE), "units": [[]] * 100_000}, source="units.json")
    assert len(error.value.details) == 1000


def test_a_unit_in_another_order_than_its_parameters_is_found() -> None:
    """Two parameters of one shape: no length in any checkpoint would show that they are swapped."""
    first, second = Parameter("a.weight", (7, 5), F32), Parameter("b.weight", (7, 5), F32)
    units = units_of_lists((Unit("", (first, second)),), use_orig_params=False, parameters=("a.weight", "b.weight"))
    assert flaws(units) == []
    swapped = units_of_lists((Unit("", (second, first)),), use_orig_params=False, parameters=("a.weight", "b.weight"))
    assert flaws(swapped) == ["the root unit lists b.weight where `parameters` lists a.weight"]
