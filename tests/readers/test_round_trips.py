"""What other trainers saved, converted to DCP and to rank files: no value changes, and verify finds nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fsdpckpt
from tests.makers import GOLDEN, Make, copied, packed
from tests.readers.contents import opened

DEEPSPEED, MEGATRON = GOLDEN / "deepspeed", GOLDEN / "megatron"
STANDARD: dict[str, Any] = {"no_weight_decay": ["standard"]}


def folder(name: str) -> Make:
    return copied(DEEPSPEED / name)


def of_deepspeed(name: str) -> Make:
    return packed(DEEPSPEED / f"{name}.tar.xz", name)


def universal(name: str) -> Make:
    return packed(DEEPSPEED / f"{name}-universal.tar.xz")


def of_megatron(name: str) -> Make:
    return packed(MEGATRON / f"{name}.tar.xz", name)


# What is saved, whether it becomes files of ranks, too, and what a conversion has to be told
SOURCES: dict[str, tuple[Make, bool, dict[str, Any]]] = {
    **{path.parent.name: (folder(path.parent.name), True, {}) for path in sorted(DEEPSPEED.glob("zero*/latest"))},
    **{name: (of_deepspeed(name), True, {}) for name in ("pipeline", "autotp-zero1", "autotp-zero3")},
    **{name: (of_deepspeed(name), True, {}) for name in ("experts", "experts-data-first", "pipeline-bf16")},
    **{name: (of_deepspeed(name), True, {}) for name in ("autoep-zero1", "autoep-zero3")},
    **{f"{name}-universal": (universal(name), True, {}) for name in ("zero1-bf16", "zero3-bf16")},
    **{name: (of_megatron(name), False, STANDARD) for name in ("uneven", "reshardable", "flattened-range")},
    "flattened-range-0.12": (of_megatron("flattened-range-0.12"), False, STANDARD),
    "fsdp-dtensor": (of_megatron("fsdp-dtensor"), False, {}),
}
LEFT_OUT = {"zero1-bf16-universal": {"adapter.weight", "head.weight", "mask"}}  # which the module states have


@pytest.mark.parametrize("name", SOURCES)
def test_no_value_changes_on_the_way_through_dcp_and_other_layouts(name: str, tmp_path: Path) -> None:
    make, ranks, options = SOURCES[name]
    (tmp_path / "made").mkdir()
    source = make(tmp_path / "made")
    assert not fsdpckpt.verify(source).problems
    unread = {Path(file.path).parent.name for file in opened(source).ledger.account.files if file.fate != "read"}
    assert unread == LEFT_OUT.get(name, set())
    fsdpckpt.convert(source, tmp_path / "dcp", to="sharded", container="dcp", world_size=5, **options)
    compared = fsdpckpt.diff(source, tmp_path / "dcp")
    assert compared.same, compared
    settled = {entry.key for entry in compared.entries if entry.sigil == "+"}
    assert settled == ({"param_groups.0.params", "param_groups.1.params"} if options else set()), "and no difference"
    if ranks:
        fsdpckpt.convert(source, tmp_path / "ranks", to="sharded", container="torch", world_size=2)
        assert fsdpckpt.diff(tmp_path / "dcp", tmp_path / "ranks").same
