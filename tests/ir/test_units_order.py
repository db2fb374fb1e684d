"""The order in which FSDP1 lists the parameters of flat parameters, those that it ignores among them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.ir.unit_lists import units_of_lists
from fsdpckpt.ir.units import Unit
from fsdpckpt.transform.id_order import listed_order, lists_own_order
from tests.oracle.fake_group import as_rank


class Inner(nn.Module):
    """Its first parameter is ignored by FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.ones(3))
        self.cut = nn.Parameter(torch.ones(5))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(2))
        self.inner = Inner()
        self.last = nn.Linear(3, 2)


def param(name: str, *shape: int) -> Parameter:
    return Parameter(name, shape, DTYPES["float32"])


UNITS = units_of_lists(
    units=(
        Unit("", (param("first", 2), param("last.weight", 2, 3), param("last.bias", 2))),
        Unit("inner", (param("inner.cut", 5),)),
    ),
    use_orig_params=False,
    parameters=("first", "inner.kept", "inner.cut", "last.weight", "last.bias"),
    unmanaged=(param("inner.kept", 3),),
)


@pytest.mark.filterwarnings("ignore")
def test_ignored_parameters_stand_where_the_wrapped_model_has_them() -> None:
    with as_rank(0, 2):
        model = Net()
        strategy = {"sharding_strategy": ShardingStrategy.FULL_SHARD, "device_id": torch.device("cpu")}
        model.inner = FullyShardedDataParallel(model.inner, ignored_states=[model.inner.kept], **strategy)
        wrapped = FullyShardedDataParallel(model, ignored_states=[model.inner.kept], **strategy)
        held = [name.replace("_fsdp_wrapped_module.", "") for name, _ in wrapped.named_parameters()]
    names_of = {unit.key: [each.name for each in unit.params] for unit in UNITS.units}
    assert list(UNITS.listed_by_unit()) == [name for key in held for name in names_of.get(key, [key])]
    assert UNITS.listed_by_unit() == ("first", "last.weight", "last.bias", "inner.kept", "inner.cut")


def test_such_a_list_is_nobodys_own_order() -> None:
    position = {name: place for place, name in enumerate(UNITS.parameters)}
    by_unit = UNITS.listed_by_unit()
    assert not lists_own_order([by_unit], position, by_unit=by_unit)
    found = listed_order([by_unit], position, by_unit=by_unit)
    assert found is not None and not found.own and "unit by unit" in found.doubt
