"""--max-memory and --threads become threads and buffers that stay under the ceiling."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpckpt.errors import UsageError
from fsdpckpt.execute.job import BUFFERS_PER_THREAD, LARGEST_WINDOW, SMALLEST_WINDOW, make_budget

LEAST = BUFFERS_PER_THREAD * SMALLEST_WINDOW


@given(st.integers(LEAST, 1 << 40), st.integers(1, 300) | st.none())
def test_no_more_threads_than_asked_for_and_never_more_memory_than_allowed(memory: int, threads: int | None) -> None:
    budget = make_budget(max_memory=memory, threads=threads)
    assert budget.nbytes <= memory
    assert 1 <= budget.threads <= (threads or 8)
    assert SMALLEST_WINDOW <= budget.window <= LARGEST_WINDOW
    assert budget.window % SMALLEST_WINDOW == 0


def test_little_memory_costs_threads_before_it_costs_window_size_below_the_least() -> None:
    assert make_budget(max_memory=3 * LEAST, threads=8).threads == 3


@pytest.mark.parametrize(("memory", "threads"), [(LEAST - 1, 1), (0, None), (1 << 30, 0), (1 << 30, -2)])
def test_too_little_of_either_is_a_usage_error(memory: int, threads: int | None) -> None:
    with pytest.raises(UsageError):
        make_budget(max_memory=memory, threads=threads)
