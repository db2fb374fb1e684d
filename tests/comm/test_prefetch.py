"""Items that another thread makes: in order, whatever it raises, and an end that does not hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fsdpckpt.comm.liveness import MAX_AHEAD, prefetched


def nothing() -> None:
    """Nothing happens while one waits."""


def test_items_come_in_order_and_from_another_thread() -> None:
    makers: set[str] = set()

    def make() -> Iterator[int]:
        for number in range(1000):
            makers.add(threading.current_thread().name)
            yield number

    assert list(prefetched(make(), nothing, name="maker")) == list(range(1000))
    assert makers == {"maker"}


def test_what_the_maker_raises_comes_after_what_it_made() -> None:
    def make() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    items = prefetched(make(), nothing, name="maker")
    assert next(items) == 1
    with pytest.raises(OSError, match="gone"):
        next(items)


def test_whoever_waits_watches_and_may_stop_waiting() -> None:
    go = threading.Event()

    def make() -> Iterator[int]:
        go.wait(20)
        yield 1

    def watch() -> None:
        go.set()
        raise TimeoutError("another worker failed")

    items = prefetched(make(), watch, name="maker")
    with pytest.raises(TimeoutError, match="another worker"):
        next(items)


def test_the_maker_is_ahead_by_a_bounded_number_and_ends_when_nobody_wants_more() -> None:
    made: list[int] = []
    full = threading.Event()

    def make() -> Iterator[int]:
        number = 0
        while True:
            made.append(number)
            if len(made) == MAX_AHEAD:
                full.set()
            yield number
            number += 1

    items = prefetched(make(), nothing, name="maker")
    assert next(items) == 0
    assert full.wait(20)
    items.close()
    assert not any(thread.name == "maker" for thread in threading.enumerate())
    assert len(made) <= MAX_AHEAD + 1
