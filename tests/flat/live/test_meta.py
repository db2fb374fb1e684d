"""Units computed from a model on the meta device are those of the same model under real FSDP1."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdpckpt.errors import SourceUnsupportedError, UsageError
from fsdpckpt.flat.live.meta import build_on_meta, units_from_model
from fsdpckpt.ir.units import Strategy
from tests.flat.live.conftest import World
from tests.flat.live.models import CASES, wrapped
from tests.oracle.flat_models import Nested, Outer

pytestmark = pytest.mark.filterwarnings("ignore")


def test_names_are_imported_and_settings_told() -> None:
    units = units_from_model(
        "tests.flat.live.models:Nested",
        ["tests.oracle.flat_models:Perceptron", nn.Linear],
        use_orig_params=False,
        strategy=Strategy.HYBRID_SHARD,
        shard_size=4,
    )
    assert {unit.strategy for unit in units.units} == {Strategy.HYBRID_SHARD}
    assert (units.shard_size, units.world_size, units.groups) == (4, None, None)
    assert len(units.units) == 8


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("tests.flat.live.models", "takes package.module:name"),
        ("tests.flat.live.models:", "takes package.module:name"),
        ("tests.flat.live.no_such_module:make", "could not be imported: ModuleNotFoundError"),
        ("tests.flat.live.models:Nested.nothing", "there is no 'nothing'"),
        ("tests.flat.live.models:CASES", "is not callable"),
        ("tests.flat.live.models:Case", "did not make a model on the meta device: TypeError"),
        ("tests.flat.live.test_meta:make_nothing", "did not return a torch.nn.Module"),
        ("tests.flat.live.test_meta:make_trouble", "did not make a model on the meta device"),
    ],
)
def test_a_factory_that_makes_no_model_is_an_error_of_usage(factory: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        units_from_model(factory, [], use_orig_params=False)
    assert said in error.value.what
    assert error.value.next_step is not None


def make_nothing() -> None:
    return None


def make_trouble() -> None:
    if torch.zeros(3).sum() > 1:  # a value, which the meta device has not
        raise AssertionError


def test_classes_and_globs_that_match_nothing_are_errors_that_show_what_there_is(world: World) -> None:
    with pytest.raises(UsageError, match=r"no module of class torch\.nn\.modules\.conv:Conv2d") as error:
        units_from_model(Nested, ["torch.nn:Conv2d"], use_orig_params=True)
    assert "tests.oracle.flat_models:Perceptron" in error.value.details
    with pytest.raises(UsageError, match="not an nn"):
        units_from_model(Nested, ["torch:tensor"], use_orig_params=True)
    with pytest.raises(UsageError, match=r"--ignore 'outer\.\*\.nothing' matches no module") as error:
        units_from_model(Nested, [], use_orig_params=True, ignored=["outer.*.nothing"])
    assert "outer.inner.up" in error.value.details
    world(2)
    model = wrapped(CASES["nested"], Nested())
    with pytest.raises(UsageError, match="wrapped already"):
        units_from_model(lambda: model, [], use_orig_params=True)


def test_what_fsdp_would_refuse_is_refused() -> None:
    frozen = CASES["partly frozen"]
    with pytest.raises(SourceUnsupportedError) as error:
        units_from_model(frozen.make, frozen.classes, use_orig_params=False)
    assert any("requires gradients" in detail for detail in error.value.details)
    scalar, integers = nn.Module(), nn.Module()
    scalar.temperature = nn.Parameter(torch.tensor(0.5))
    integers.table = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    for make, classes, words in (
        (lambda: Nested(torch.bfloat16), [Outer], "one dtype"),
        (lambda: scalar, [], "temperature"),
        (lambda: integers, [], "table is int64, and FSDP1 flattens only floats"),
        (nn.Tanh, [], "no parameter is left"),
        (lambda: nn.Sequential(nn.Linear(0, 4, bias=False)), [], "a unit without elements"),
    ):
        with pytest.raises(SourceUnsupportedError, match=words):
            units_from_model(make, classes, use_orig_params=True)


def test_the_model_takes_no_memory() -> None:
    assert all(param.is_meta for param in build_on_meta(Nested).parameters())
    units = units_from_model(lambda: nn.Linear(1 << 20, 1 << 20, bias=False), [], use_orig_params=True)
    assert units.units[0].params[0].numel == 1 << 40
