"""While a checkpoint becomes objects the collector stands still, and afterwards it does not walk them all."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from fsdpckpt.cli.entry import main
from fsdpckpt.process import gc_frozen, gc_paused


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    before = gc.isenabled()
    gc.enable()
    yield
    gc.enable() if before else gc.disable()


def test_nothing_is_collected_inside_and_the_collector_is_afterwards_as_it_was() -> None:
    with pytest.raises(KeyError), gc_paused():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


def test_what_was_made_inside_is_not_young_any_more() -> None:
    with gc_paused():
        made = [[number] for number in range(20_000)]
        assert len(gc.get_objects(generation=0)) > len(made)
    assert len(gc.get_objects(generation=0)) < 1_000


def test_what_is_set_aside_is_neither_young_nor_old_until_the_block_ends() -> None:
    made = [[number] for number in range(20_000)]
    with gc_frozen():
        assert gc.get_freeze_count() > len(made)
        assert len(gc.get_objects()) < 1_000
    assert gc.get_freeze_count() == 0
    assert len(gc.get_objects()) > len(made)


def test_objects_that_the_caller_froze_stay_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with gc_frozen(), gc_paused():
            pass
        assert gc.get_freeze_count() >= frozen > 0
    finally:
        gc.unfreeze()


def test_what_was_made_in_pauses_and_left_in_circles_is_collected() -> None:
    """Each reading of a checkpoint left its circles behind for as long as the process lived."""

    class Circle:
        def __init__(self) -> None:
            self.own = self

    first: weakref.ref[Circle] | None = None
    for _ in range(4):
        with gc_paused():
            made = [Circle() for _ in range(200_000)]
        first = first or weakref.ref(made[0])
        del made
    assert first is not None and first() is None


def test_a_program_that_goes_on_after_a_command_can_still_collect(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = gc.get_freeze_count()
    monkeypatch.setattr(sys, "argv", ["fsdpckpt", "version"])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, gc.get_freeze_count()) == (0, before)
    assert "fsdpckpt" in capsys.readouterr().out
