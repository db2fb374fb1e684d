"""Units inferred from names, prefixes and the lengths of slices: what is proved, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpckpt.errors import NeedsInformationError, required
from fsdpckpt.flat.names import UnitPrefixes, prefixes_of
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.flat.units.candidates import candidates
from fsdpckpt.flat.units.inference import Refusal, find_inferred
from fsdpckpt.flat.units.request import ResolvedUnits
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.listing import Listing
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.units import Strategy, Units
from tests.flat.flat_synthetic import checkpoint, local_model, name_list, named, optimizer, sharded_model
from tests.refusals import Refused

BF16 = DTYPES["bfloat16"]

MODEL = (
    named("e.weight", 17, 9),
    named("l.0.a.weight", 28, 9),
    named("l.0.a.bias", 28),
    named("l.0.n.weight", 9),
    named("l.1.a.weight", 28, 9),
    named("l.1.a.bias", 28),
    named("l.1.n.weight", 9),
    named("h.weight", 17, 9),
    named("h.bias", 17),
)
LAYERS = ("", "l.0", "l.1")
FROM_GLOBS = UnitPrefixes(LAYERS, complete=False, label="--unit l.*")


def units_of(
    params: Sequence[Parameter] = MODEL, prefixes: Sequence[str] = LAYERS, *, orig: bool, **rest: object
) -> Units:
    return build_units(params, prefixes, Settings(orig, **rest))  # type: ignore[arg-type]


ROOT = UnitPrefixes(("",), complete=False, label="--unit none")


@dataclass(frozen=True)
class Row:
    """The flat shards of a job whose units are ``truth``, on ``world_size`` ranks.

    ``names``: of the model, as they are listed, with ``ordered``; ``prefixes``: of the units, as globs give them;
    ``optim``: how its optimizer was saved, None without one; ``model``: what is saved beside it; ``wanted``: settings
    that were given, ``preferred``: those of the target; ``parameters``: the user's list.

    ``found``: the units, None or what is said where nothing fits, or what is asked. ``keys``: what the ids are;
    ``open_settings``: what no length shows.
    """

    truth: Units
    found: Units | Refused | str | None
    names: Sequence[Parameter] = MODEL
    ordered: bool = True
    from_reference: bool = False
    prefixes: UnitPrefixes = FROM_GLOBS
    world_size: int = 4
    optim: Mapping[str, Any] | None = field(default_factory=dict)
    model: Callable[[], ModelState] | None = None
    wanted: Settings = Settings()  # noqa: RUF009
    preferred: Settings | None = None
    parameters: Sequence[str] | None = None
    keys: Sequence[str] | None = None
    open_settings: tuple[str, ...] = ()

    def source(self) -> Checkpoint:
        optim = None if self.optim is None else optimizer(self.truth, self.world_size, **self.optim)
        return checkpoint(self.world_size, model=self.model() if self.model is not None else None, optim=optim)

    def infer(self) -> ResolvedUnits | Refusal:
        source = self.source()
        names = name_list(*self.names, ordered=self.ordered, from_reference=self.from_reference)
        more = {} if self.parameters is None else {"parameters": self.parameters}
        of_names = candidates(source, names, self.prefixes, **more)
        return required(find_inferred(source, of_names, wanted=self.wanted, preferred=self.preferred))


def same(truth: Units, **more: Any) -> Row:
    return Row(truth, truth, **more)


def loose(params: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Names of which nothing says whether they are sharded."""
    return tuple(replace(one, sharded=None) for one in params)


def shaped(*params: tuple[Any, ...], sharded: bool | None = True) -> tuple[Parameter, ...]:
    return tuple(named(name, *shape, sharded=sharded) for name, *shape in params)


FLAT, ORIG = units_of(orig=False), units_of(orig=True)
WRAPPED_NAMES = [
    f"_fsdp_wrapped_module.{name}".replace("l.0.", "l.0._fsdp_wrapped_module.").replace(
        "l.1.", "l.1._fsdp_wrapped_module.")
    for name in ORIG.parameters
]  # fmt: skip
WRAPPED_KEYS = [
    "_fsdp_wrapped_module._flat_param",
    *(f"_fsdp_wrapped_module.l.{n}._fsdp_wrapped_module._flat_param" for n in (0, 1)),
]
FROM_KEYS, FROM_WORDS = (
    UnitPrefixes(LAYERS, complete=True, label=label) for label in ("the flat parameters' keys", "param_names")
)
EVEN = shaped(("a.weight", 16, 8), ("b.weight", 24, 8))
ALIKE = (*shaped(("n.weight", 9), ("n.running", 9), sharded=None), named("a.weight", 7, 5))
LIKE_A_BUFFER = shaped(("a.scale", 9), ("position", 3, 3), ("b.scale", 4), ("a.weight", 7, 5), sharded=None)
TIED = (*MODEL[:-2], named("h.weight", 17, 9))
OWN_SIZE = (*MODEL[:4], named("l.1.a.weight", 29, 9), *MODEL[5:])
MATRICES = tuple(named(f"p.{number}", 6, 8) for number in range(4))
BY_NAME = tuple(sorted(MODEL, key=lambda one: one.name))
PAIR = shaped(("a.weight", 5, 3), ("b.weight", 7, 3))
EACH = shaped(("a.weight", 7, 3), ("b.weight", 5, 3), ("c.weight", 11, 3))
SWAPPED = (MODEL[0], MODEL[2], MODEL[1], *MODEL[3:])
SQUARES = shaped(("a.weight", 6, 7), ("b.weight", 7, 6), ("c.weight", 5))
KERNEL, POINTWISE = shaped(("c.weight", 4, 3, 3, 3), ("c.bias", 4)), shaped(("c.weight", 4, 3, 1, 1), ("c.bias", 4))
LAST = (replace(KERNEL[0], stride=(27, 1, 9, 3)), KERNEL[1])
TINY = shaped(("a.w", 5), ("b.x", 1), ("c.x", 1))
OTHER_BIAS = tuple(replace(one, shape=(36,)) if one.name == "l.1.a.bias" else one for one in MODEL)
VECTORS = [[name for name in ORIG.parameters if name.endswith("bias") is bias] for bias in (False, True)]
HALF = units_of(orig=True, param_dtype=BF16)


def root_of(params: Sequence[Parameter], *, orig: bool = False) -> Units:
    return units_of(params, ("",), orig=orig)


# fmt: off
ROWS: dict[str, Row] = {
    # The job's own settings
    **{f"{'original' if truth is ORIG else 'flat'} parameters on {world_size} ranks": same(
        truth, world_size=world_size, keys=truth.optimizer_keys())
       for truth in (FLAT, ORIG) for world_size in (2, 3, 5, 16)},
    "an alignment that shows": same(HALF),
    "an alignment that makes no difference": same(
        root_of(EVEN, orig=True), names=EVEN, prefixes=ROOT, open_settings=("param_dtype",)),
    **{f"{strategy}, {orig=}": same(
        units_of(orig=orig, strategy=strategy, shard_size=2 if strategy is Strategy.HYBRID_SHARD else None),
        open_settings=("param_dtype",) if orig and strategy is Strategy.NO_SHARD else ())
       for strategy in (Strategy.HYBRID_SHARD, Strategy.NO_SHARD) for orig in (False, True)},
    "settings that were given": Row(
        HALF, units_of(orig=True, param_dtype=BF16, strategy=Strategy.SHARD_GRAD_OP),
        wanted=Settings(True, Strategy.SHARD_GRAD_OP, BF16)),
    "a use_orig_params that is wrong": Row(HALF, None, wanted=Settings(use_orig_params=False)),
    "a param_dtype that is wrong": Row(HALF, None, wanted=Settings(param_dtype=DTYPES["float32"])),
    "a strategy that is wrong": Row(HALF, None, wanted=Settings(strategy=Strategy.NO_SHARD)),

    # Wrapping
    "another wrapping": Row(FLAT, None, prefixes=ROOT),
    "flat parameters that name the units": same(
        FLAT, prefixes=FROM_KEYS, optim=None, model=lambda: local_model(FLAT, 3), world_size=3),
    "param_names whose wrappers show where units begin": same(
        ORIG, prefixes=FROM_WORDS, optim={"param_names": [WRAPPED_NAMES]}),
    "param_names of flat parameters": same(FLAT, prefixes=FROM_WORDS, optim={"param_names": [WRAPPED_KEYS]}),
    "a root that was not wrapped": same(units_of(loose(MODEL), LAYERS[1:], orig=False), names=loose(MODEL)),

    # Names
    "names of another model, flat parameters": Row(FLAT, None, names=OTHER_BIAS),
    "names of another model": Row(ORIG, None, names=OTHER_BIAS),
    "names of another model, whole states": Row(ORIG, "other shapes", names=OTHER_BIAS, world_size=1),
    "a buffer that lengths tell": same(FLAT, names=(*loose(MODEL), named("l.1.position", 77, sharded=None))),
    "a buffer and a parameter of one length": Row(
        root_of((ALIKE[0], ALIKE[2])), Refused(4, ["ambiguous", "--parameters"]), names=ALIKE, prefixes=ROOT,
        world_size=2),
    "and settings of a target do not decide": Row(
        root_of((ALIKE[0], ALIKE[2])), Refused(4, ["ambiguous", "--parameters"]), names=ALIKE, prefixes=ROOT,
        world_size=2, preferred=Settings(use_orig_params=False)),
    "a list says which is the buffer": same(
        root_of((ALIKE[0], ALIKE[2])), names=ALIKE, prefixes=ROOT, world_size=2, parameters=("n.weight", "a.weight")),
    # Of names whose last components agree all are buffers or none: that alone would leave out ``position``
    "a buffer that is called like a parameter": Row(
        root_of(LIKE_A_BUFFER[1:]), Refused(4, [
            "ambiguous", "treated as buffers: position", "position treated as a parameter, a.scale as a buffer"]),
        names=LIKE_A_BUFFER, prefixes=ROOT, world_size=2),
    "a list says that it is": same(
        root_of(LIKE_A_BUFFER[1:]), names=LIKE_A_BUFFER, prefixes=ROOT, world_size=2,
        parameters=[one.name for one in LIKE_A_BUFFER[1:]]),
    "a shared parameter that a length shows": Row(
        units_of(TIED[:-1], orig=False), build_units(
            TIED[:-1], LAYERS, Settings(use_orig_params=False), shared=[("h.weight", "e.weight")]), names=TIED),
    # Its element is hidden by padding: names that fit as they are need no such assumption
    "what would fit as a shared parameter, too": same(root_of(TINY), names=TINY, prefixes=ROOT),
    "a shared parameter beside a buffer": Row(
        units_of(TIED[:-1], orig=False), build_units(
            TIED[:-1], LAYERS, Settings(use_orig_params=False), shared=[("h.weight", "e.weight")]),
        names=(*loose(TIED), named("e.position", 40, sharded=None))),
    "a frozen unit that is the only fit": Row(
        units_of(OWN_SIZE, orig=False), units_of(OWN_SIZE, orig=False), names=OWN_SIZE,
        optim={"groups": [("_flat_param", "l.1._flat_param")]}, keys=("_flat_param", "l.1._flat_param")),
    "two units that may be the frozen one": Row(
        FLAT, Refused(4, ["ambiguous", "l.0._flat_param", "--units"]),
        optim={"groups": [("_flat_param", "l.1._flat_param")]}),

    # Groups and orders
    "groups that only one assignment fits": same(
        ORIG, world_size=5, optim={"groups": VECTORS}, keys=[*VECTORS[0], *VECTORS[1]]),
    "groups that two assignments fit": Row(
        root_of(MATRICES, orig=True), Refused(4, "ambiguous"), names=MATRICES, prefixes=ROOT, world_size=1,
        optim={"groups": [["p.0", "p.2"], ["p.1", "p.3"]]}),
    **{f"names in no order, {orig=}": Row(
        units_of(BY_NAME, orig=orig), Refused(4, "order"), names=BY_NAME, ordered=False) for orig in (False, True)},
    "names in no order in one flat parameter": Row(
        root_of(PAIR), Refused(4, "2 parameters are in the root unit"), names=PAIR, ordered=False, prefixes=ROOT,
        world_size=2),
    "names in no order, each in a unit of its own length": Row(
        units_of(EACH, ("a", "b", "c"), orig=False), units_of(EACH, ("a", "b", "c"), orig=False), names=EACH,
        ordered=False, prefixes=UnitPrefixes(("", "a", "b", "c"), complete=False, label="--unit *"), world_size=2,
        keys=("a._flat_param", "b._flat_param", "c._flat_param")),
    "names in no order, each of its own length": Row(
        root_of(EACH, orig=True), root_of(EACH, orig=True), names=EACH, ordered=False, prefixes=ROOT, world_size=2,
        keys=("a.weight", "b.weight", "c.weight"), open_settings=("param_dtype",)),
    "names in no order, of which one has no states": Row(
        root_of(EACH, orig=True), Refused(4, "optimizer key 1 does not show how long its parameter b.weight is"),
        names=EACH, ordered=False, prefixes=ROOT, world_size=2, optim={"without": ["b.weight"]}),
    "a reference in another dtype": same(
        ORIG, names=[replace(one, dtype=BF16) for one in MODEL], from_reference=True),
    "the order of the model beside it": same(FLAT, model=lambda: sharded_model(MODEL)),
    "another order than that of the model beside it": Row(
        FLAT, None, names=SWAPPED, model=lambda: sharded_model(MODEL)),
    "two parameters of one size in another order than the model's": Row(
        root_of(SQUARES), None, names=(SQUARES[1], SQUARES[0], SQUARES[2]), prefixes=ROOT, world_size=3,
        model=lambda: sharded_model(SQUARES)),
    # A channels_last model has the same names, shapes and lengths, and other bytes
    "kernels whose memory order nothing shows": Row(
        root_of(KERNEL), Refused(4, "channels_last"), names=KERNEL, prefixes=ROOT, world_size=2),
    **{f"kernels {shape} whose memory order nothing shows": Row(
        root_of(shaped(("c.weight", *shape))), Refused(4, "channels_last"), names=shaped(("c.weight", *shape)),
        prefixes=ROOT, world_size=2) for shape in ((4, 2, 3, 3), (4, 3, 2, 1), (2, 2, 1, 1, 2))},
    "kernels whose memory order is known": Row(
        root_of(KERNEL), root_of(LAST), names=LAST, prefixes=ROOT, world_size=2),
    "kernels of one element": same(root_of(POINTWISE), names=POINTWISE, prefixes=ROOT, world_size=2),
}
# fmt: on


@pytest.mark.parametrize("name", ROWS)
def test_units_are_inferred_from_names_prefixes_and_lengths(name: str) -> None:
    row = ROWS[name]
    if isinstance(row.found, Refused):
        row.found.by(row.infer)
        return
    found = row.infer()
    if row.found is None or isinstance(row.found, str):
        assert isinstance(found, Refusal) and found.contradictions
        assert (row.found or "") in found.contradictions[0]
        return
    assert isinstance(found, ResolvedUnits), found

    for unit, expected in zip(found.units.units, row.found.units, strict=True):
        assert (unit.prefix, unit.strategy, unit.param_dtype) == (
            expected.prefix, expected.strategy, expected.param_dtype
        )  # fmt: skip
        own, others = ([(one.name, one.shape, one.stride) for one in each.params] for each in (unit, expected))
        assert own == others
    assert found.units.use_orig_params is row.found.use_orig_params
    assert {param.dtype.name for param in found.units.params().values()} == {"float32"}
    assert found.units.shard_size == row.found.shard_size
    if row.found.shard_size is not None:
        assert f"hybrid-shard in groups of {row.found.shard_size} ranks" in found.how[-1]
    assert found.units.shared == row.found.shared
    assert [param.name for param in found.units.unmanaged] == [param.name for param in row.found.unmanaged]
    assert found.open_settings == row.open_settings
    assert row.keys is None or list(found.match.keys.values()) == list(row.keys)


def test_where_units_begin_is_read_from_keys_and_param_names() -> None:
    of_model = prefixes_of(checkpoint(3, model=local_model(FLAT, 3)))
    assert of_model is not None
    assert of_model.complete
    label = "the optimizer's names (param_names)"
    words = prefixes_of(checkpoint(4, optim=optimizer(ORIG, 4, param_names=[WRAPPED_NAMES])))
    assert words == UnitPrefixes(LAYERS, complete=True, label=label)
    flat = prefixes_of(checkpoint(4, optim=optimizer(FLAT, 4, param_names=[WRAPPED_KEYS])))
    assert flat is not None
    assert set(flat.prefixes) == set(LAYERS)


def inferred(source: Checkpoint, names: Listing, prefixes: UnitPrefixes) -> ResolvedUnits | Refusal:
    return required(find_inferred(source, candidates(source, names, prefixes), wanted=Settings()))


def test_a_large_model_that_does_not_fit_is_refused_soon() -> None:
    params = [named("e.weight", 320, 64)]
    for layer in range(40):
        params += [named(f"l.{layer}.{name}.weight", 64, 64) for name in "abcd"]
    layers = [f"l.{layer}" for layer in range(40)]
    truth = units_of(params, ("", *layers), orig=False)
    source = checkpoint(8, optim=optimizer(truth, 8))
    begun = time.monotonic()
    assert isinstance(inferred(source, name_list(*params), UnitPrefixes(("",), complete=False, label="-")), Refusal)
    assert time.monotonic() - begun < 5


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_is_inferred_reads_every_key_as_the_job_that_wrote_it(data: st.DataObject) -> None:
    """Either the truth or a question: never another answer."""
    shapes = data.draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=6))
    params = tuple(named(f"m.{number % 3}.w{number}", *shape) for number, shape in enumerate(shapes))
    params = tuple(sorted(params, key=lambda one: one.name.split(".")[1]))
    prefixes = ("", *sorted(data.draw(st.sets(st.sampled_from([f"m.{n}" for n in range(min(3, len(shapes)))])))))
    world_size = data.draw(st.sampled_from([1, 2, 3, 4, 6]))
    divisors = [size for size in (2, 3) if world_size % size == 0 and size < world_size]
    shard_size = data.draw(st.sampled_from([None, *divisors]))
    truth = build_units(
        params,
        prefixes,
        Settings(
            data.draw(st.booleans()),
            Strategy.HYBRID_SHARD
            if shard_size
            else data.draw(st.sampled_from([Strategy.FULL_SHARD, Strategy.NO_SHARD])),
            data.draw(st.sampled_from([None, BF16])),
            shard_size,
        ),
    )
    source = checkpoint(world_size, optim=optimizer(truth, world_size))
    try:
        found = inferred(source, name_list(*params), UnitPrefixes(prefixes, complete=False, label="--unit"))
    except NeedsInformationError:
        return
    assert isinstance(found, ResolvedUnits), found
    listed = [key for group in found.units.groups or () for key in group]
    keys = dict(found.match.keys) if found.match.flat_optimizer else dict(enumerate(listed))
    assigned = {key: _names(found.units, name) for key, name in keys.items()}
    assert assigned == {number: _names(truth, key) for number, key in enumerate(truth.optimizer_keys())}
    for unit in truth.units:
        starts = found.match.layouts[unit.key].start
        if not truth.use_orig_params:
            assert starts.tolist() == [sum(one.numel for one in unit.params[:n]) for n in range(len(unit.params))]


def _names(units: Units, key: str) -> tuple[str, ...]:
    return next((tuple(param.name for param in unit.params) for unit in units.units if unit.key == key), (key,))
