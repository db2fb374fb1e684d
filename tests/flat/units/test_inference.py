"""Units inferred from names, prefixes and the lengths of slices: what is proved, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.flat.names import UnitPrefixes, prefixes_of
from fsdpckpt.flat.units import Settings, build_units
from fsdpckpt.flat.units.candidates import candidates
from fsdpckpt.flat.units.inference import Refusal, infer
from fsdpckpt.flat.units.request import ResolvedUnits
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.listing import Listing
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.units import Strategy, Units
from tests.flat.flat_synthetic import checkpoint, local_model, name_list, named, optimizer, sharded_model

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


def inferred(
    source: Checkpoint,
    names: Listing | None = None,
    prefixes: UnitPrefixes = FROM_GLOBS,
    wanted: Settings = Settings(),  # noqa: B008
    **rest: object,
) -> ResolvedUnits | Refusal:
    return infer(source, candidates(source, names or name_list(*MODEL), prefixes, **rest), wanted=wanted)  # type: ignore[arg-type]


def proved(*args: object, **rest: object) -> ResolvedUnits:
    found = inferred(*args, **rest)  # type: ignore[arg-type]
    assert isinstance(found, ResolvedUnits), found
    return found


@pytest.mark.parametrize("world_size", [2, 3, 5, 16])
@pytest.mark.parametrize("orig", [False, True])
def test_names_and_prefixes_of_the_job_give_its_units(orig: bool, world_size: int) -> None:
    truth = units_of(orig=orig)
    found = proved(checkpoint(world_size, optim=optimizer(truth, world_size)))
    assert found.units.units == truth.units
    assert found.units.use_orig_params is orig
    assert found.open_settings == ()
    assert list(found.match.keys.values()) == list(truth.optimizer_keys())


def test_the_dtype_that_decides_the_alignment_is_found_when_it_shows() -> None:
    truth = units_of(orig=True, param_dtype=BF16)
    found = proved(checkpoint(4, optim=optimizer(truth, 4)))
    assert {unit.param_dtype for unit in found.units.units} == {BF16}


def test_an_alignment_that_makes_no_difference_is_reported_as_unsettled() -> None:
    params = (named("a.weight", 16, 8), named("b.weight", 24, 8))
    truth = units_of(params, ("",), orig=True)
    found = proved(
        checkpoint(4, optim=optimizer(truth, 4)), name_list(*params), UnitPrefixes(("",), complete=False, label="-")
    )
    assert found.open_settings == ("param_dtype",)


@pytest.mark.parametrize("orig", [False, True])
def test_a_sharding_group_of_half_the_ranks_is_found(orig: bool) -> None:
    truth = units_of(orig=orig, strategy=Strategy.HYBRID_SHARD, shard_size=2)
    found = proved(checkpoint(4, optim=optimizer(truth, 4)))
    assert found.units.shard_size == 2
    assert {unit.strategy for unit in found.units.units} == {Strategy.HYBRID_SHARD}


@pytest.mark.parametrize("orig", [False, True])
def test_no_shard_is_found(orig: bool) -> None:
    truth = units_of(orig=orig, strategy=Strategy.NO_SHARD)
    found = proved(checkpoint(3, optim=optimizer(truth, 3)))
    assert {unit.strategy for unit in found.units.units} == {Strategy.NO_SHARD}
    assert found.units.use_orig_params is orig


def test_another_wrapping_than_the_job_used_is_refused_with_what_contradicts_it() -> None:
    truth = units_of(orig=False)
    found = inferred(
        checkpoint(4, optim=optimizer(truth, 4)), prefixes=UnitPrefixes(("",), complete=False, label="--unit none")
    )
    assert isinstance(found, Refusal)
    assert found.contradictions


@pytest.mark.parametrize("orig", [False, True])
def test_names_of_another_model_are_refused(orig: bool) -> None:
    other = tuple(replace(one, shape=(36,)) if one.name == "l.1.a.bias" else one for one in MODEL)
    found = inferred(checkpoint(4, optim=optimizer(units_of(orig=orig), 4)), name_list(*other))
    assert isinstance(found, Refusal)


def test_flat_parameters_name_the_units_and_prove_them() -> None:
    truth = units_of(orig=False)
    source = checkpoint(3, model=local_model(truth, 3))
    prefixes = prefixes_of(source)
    assert prefixes is not None
    assert prefixes.complete
    found = proved(source, prefixes=prefixes)
    assert found.units.units == truth.units
    assert found.units.use_orig_params is False


def test_wrapper_segments_in_param_names_show_where_units_begin() -> None:
    truth = units_of(orig=True)
    raw = [
        name.replace("l.0.", "l.0._fsdp_wrapped_module.").replace("l.1.", "l.1._fsdp_wrapped_module.")
        for name in truth.parameters
    ]
    names = [f"_fsdp_wrapped_module.{name}" for name in raw]
    source = checkpoint(4, optim=optimizer(truth, 4, param_names=[names]))
    prefixes = prefixes_of(source)
    assert prefixes == UnitPrefixes(LAYERS, complete=True, label="the optimizer's names (param_names)")
    assert proved(source, prefixes=prefixes).units.units == truth.units


def test_flat_parameters_in_param_names_show_the_units_too() -> None:
    truth = units_of(orig=False)
    names = [
        "_fsdp_wrapped_module._flat_param",
        *(f"_fsdp_wrapped_module.l.{n}._fsdp_wrapped_module._flat_param" for n in (0, 1)),
    ]
    source = checkpoint(4, optim=optimizer(truth, 4, param_names=[names]))
    prefixes = prefixes_of(source)
    assert prefixes is not None
    assert set(prefixes.prefixes) == set(LAYERS)
    assert proved(source, prefixes=prefixes).units.units == truth.units


def test_a_root_that_was_not_wrapped_leaves_its_parameters_whole() -> None:
    loose = tuple(replace(one, sharded=None) for one in MODEL)
    truth = units_of(loose, LAYERS[1:], orig=False)
    found = proved(checkpoint(4, optim=optimizer(truth, 4)), name_list(*loose))
    assert [unit.prefix for unit in found.units.units] == ["l.0", "l.1"]
    assert [param.name for param in found.units.unmanaged] == ["e.weight", "h.weight", "h.bias"]


def test_buffers_among_the_names_are_told_by_the_lengths() -> None:
    with_buffer = (*(replace(one, sharded=None) for one in MODEL), named("l.1.position", 77, sharded=None))
    found = proved(checkpoint(4, optim=optimizer(units_of(orig=False), 4)), name_list(*with_buffer))
    assert "l.1.position" not in found.units.params()


def test_names_that_may_be_buffers_or_parameters_with_the_same_lengths_are_refused() -> None:
    """Which of two equally long vectors is in the flat parameter: no length can tell."""
    params = (named("n.weight", 9, sharded=None), named("n.running", 9, sharded=None), named("a.weight", 7, 5))
    truth = units_of((params[0], params[2]), ("",), orig=False)
    root = UnitPrefixes(("",), complete=False, label="--unit none")
    with pytest.raises(NeedsInformationError, match="ambiguous") as caught:
        inferred(checkpoint(2, optim=optimizer(truth, 2)), name_list(*params), root)
    assert "--parameters" in caught.value.text
    found = proved(
        checkpoint(2, optim=optimizer(truth, 2)), name_list(*params), root, parameters=("n.weight", "a.weight")
    )
    assert list(found.units.params()) == ["n.weight", "a.weight"]


def test_a_buffer_that_is_called_like_a_parameter_makes_others_of_its_size_uncertain() -> None:
    """Of the names whose last components agree, all are buffers or none: that alone would leave out ``position``."""
    sizes = {"a.scale": (9,), "position": (3, 3), "b.scale": (4,), "a.weight": (7, 5)}
    params = [named(name, *shape, sharded=None) for name, shape in sizes.items()]
    truth = units_of(params[1:], ("",), orig=False)
    root = UnitPrefixes(("",), complete=False, label="--unit none")
    source = checkpoint(2, optim=optimizer(truth, 2))
    with pytest.raises(NeedsInformationError, match="ambiguous") as caught:
        inferred(source, name_list(*params), root)
    assert {line.partition(";")[0] for line in caught.value.details} == {
        "treated as buffers: position",
        "position treated as a parameter, a.scale as a buffer",
    }
    found = proved(source, name_list(*params), root, parameters=[*sizes][1:])
    assert list(found.units.params()) == [*sizes][1:]


def test_a_shared_parameter_is_found_by_the_length_of_its_unit() -> None:
    params = (*MODEL[:-2], named("h.weight", 17, 9))
    truth = build_units(params[:-1], LAYERS, Settings(use_orig_params=False))
    found = proved(checkpoint(4, optim=optimizer(truth, 4)), name_list(*params))
    assert found.units.shared == (("h.weight", "e.weight"),)


def test_a_frozen_unit_that_the_optimizer_was_not_given_is_found_when_it_is_the_only_fit() -> None:
    params = (*MODEL[:1], *MODEL[1:4], named("l.1.a.weight", 29, 9), *MODEL[5:])
    truth = units_of(params, orig=False)
    source = checkpoint(4, optim=optimizer(truth, 4, groups=[("_flat_param", "l.1._flat_param")]))
    found = proved(source, name_list(*params))
    assert dict(found.match.keys) == {0: "_flat_param", 1: "l.1._flat_param"}


def test_which_of_two_equal_units_is_frozen_is_asked_not_guessed() -> None:
    source = checkpoint(4, optim=optimizer(units_of(orig=False), 4, groups=[("_flat_param", "l.1._flat_param")]))
    with pytest.raises(NeedsInformationError, match="ambiguous") as caught:
        inferred(source)
    assert any("l.0._flat_param" in detail for detail in caught.value.details)
    assert "--units" in str(caught.value.next_step)


def test_groups_whose_parameters_only_one_assignment_fits_are_found() -> None:
    truth = units_of(orig=True)
    names = list(truth.parameters)
    vectors = [name for name in names if name.endswith("bias")]
    groups = [[name for name in names if name not in vectors], vectors]
    found = proved(checkpoint(5, optim=optimizer(truth, 5, groups=groups)))
    assert list(found.match.keys.values()) == [*groups[0], *groups[1]]


def test_groups_that_two_assignments_fit_are_refused() -> None:
    params = tuple(named(f"p.{number}", 6, 8) for number in range(4))
    truth = units_of(params, ("",), orig=True)
    groups = [["p.0", "p.2"], ["p.1", "p.3"]]
    source = checkpoint(1, optim=optimizer(truth, 1, groups=groups))
    with pytest.raises(NeedsInformationError, match="ambiguous"):
        inferred(source, name_list(*params), UnitPrefixes(("",), complete=False, label="--unit none"))


@pytest.mark.parametrize("orig", [False, True])
def test_names_without_an_order_are_refused_where_the_order_decides(orig: bool) -> None:
    params = tuple(sorted(MODEL, key=lambda one: one.name))
    truth = units_of(params, orig=orig)
    with pytest.raises(NeedsInformationError, match="order"):
        inferred(checkpoint(4, optim=optimizer(truth, 4)), name_list(*params, ordered=False))


def test_the_order_within_one_flat_parameter_is_not_shown_by_its_length() -> None:
    params = (named("a.weight", 5, 3), named("b.weight", 7, 3))
    source = checkpoint(2, optim=optimizer(units_of(params, ("",), orig=False), 2))
    root = UnitPrefixes(("",), complete=False, label="--unit none")
    with pytest.raises(NeedsInformationError, match="2 parameters are in the root unit"):
        inferred(source, name_list(*params, ordered=False), root)


def test_names_without_an_order_do_where_every_unit_has_one_parameter_of_its_own_length() -> None:
    params = (named("a.weight", 7, 3), named("b.weight", 5, 3), named("c.weight", 11, 3))
    truth = units_of(params, ("a", "b", "c"), orig=False)
    found = proved(
        checkpoint(2, optim=optimizer(truth, 2)),
        name_list(*params, ordered=False),
        UnitPrefixes(("", "a", "b", "c"), complete=False, label="--unit *"),
    )
    assert list(found.match.keys.values()) == ["a._flat_param", "b._flat_param", "c._flat_param"]


def test_a_reference_in_another_dtype_does_not_change_the_alignment() -> None:
    exported = tuple(replace(one, dtype=BF16) for one in MODEL)
    truth = units_of(orig=True)
    found = proved(checkpoint(4, optim=optimizer(truth, 4)), name_list(*exported, from_reference=True))
    assert {param.dtype.name for param in found.units.params().values()} == {"float32"}


def test_the_model_section_of_the_same_checkpoint_has_to_agree() -> None:
    truth = units_of(orig=False)
    swapped = (MODEL[0], MODEL[2], MODEL[1], *MODEL[3:])
    source = checkpoint(4, model=sharded_model(MODEL), optim=optimizer(truth, 4))
    assert isinstance(inferred(source, name_list(*swapped)), Refusal)
    assert isinstance(inferred(source), ResolvedUnits)


def test_two_parameters_of_one_size_in_the_other_order_are_refused_by_the_model_section() -> None:
    params = (named("a.weight", 6, 7), named("b.weight", 7, 6), named("c.weight", 5))
    truth = units_of(params, ("",), orig=False)
    source = checkpoint(3, model=sharded_model(params), optim=optimizer(truth, 3))
    other = name_list(params[1], params[0], params[2])
    root = UnitPrefixes(("",), complete=False, label="--unit none")
    assert isinstance(inferred(source, other, root), Refusal)


def test_kernels_whose_memory_order_nothing_shows_are_refused() -> None:
    """A channels_last model has the same names, shapes and lengths, and other bytes."""
    params = (named("c.weight", 4, 3, 3, 3), named("c.bias", 4))
    truth = units_of(params, ("",), orig=False)
    root = UnitPrefixes(("",), complete=False, label="--unit none")
    source = checkpoint(2, optim=optimizer(truth, 2))
    with pytest.raises(NeedsInformationError, match="channels_last"):
        inferred(source, name_list(*params), root)
    last = (replace(params[0], stride=(27, 1, 9, 3)), params[1])
    assert proved(source, name_list(*last), root).units.units[0].params[0].stride == (27, 1, 9, 3)
    pointwise = (named("c.weight", 4, 3, 1, 1), params[1])
    source = checkpoint(2, optim=optimizer(units_of(pointwise, ("",), orig=False), 2))
    assert proved(source, name_list(*pointwise), root)


def test_a_shared_parameter_is_found_beside_a_buffer() -> None:
    params = tuple(replace(one, sharded=None) for one in (*MODEL[:-2], named("h.weight", 17, 9)))
    truth = build_units(params[:-1], LAYERS, Settings(use_orig_params=False))
    names = name_list(*params, named("e.position", 40, sharded=None))
    found = proved(checkpoint(4, optim=optimizer(truth, 4)), names)
    assert found.units.shared == (("h.weight", "e.weight"),)
    assert "e.position" not in found.units.params()


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


def test_settings_that_were_given_are_not_searched() -> None:
    truth = units_of(orig=True, param_dtype=BF16)
    source = checkpoint(4, optim=optimizer(truth, 4))
    assert isinstance(inferred(source, wanted=Settings(use_orig_params=False)), Refusal)
    assert isinstance(inferred(source, wanted=Settings(param_dtype=DTYPES["float32"])), Refusal)
    assert isinstance(inferred(source, wanted=Settings(strategy=Strategy.NO_SHARD)), Refusal)
    assert (
        proved(source, wanted=Settings(True, Strategy.SHARD_GRAD_OP, BF16)).units.units[0].strategy == "shard-grad-op"
    )


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
