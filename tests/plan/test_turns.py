"""Target files take turns, window by window: threads that write to different files do not wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.targets import Target, TargetFile
from fsdpckpt.ir.tensors import Chunks, Tensor
from fsdpckpt.plan import make_plan
from fsdpckpt.plan.transfer import TransferPlan, partition, plan_transfers
from fsdpckpt.plan.written import NOTHING_WRITTEN

WINDOW = 64
LENGTHS = (5 * WINDOW, 0, 2 * WINDOW - 7, WINDOW, 3 * WINDOW)  # bytes of each target file


def transfers(
    files_at_once: int, *, received: bool, lengths: Sequence[int] = LENGTHS, senders: int = 1
) -> TransferPlan:
    """Rank 0 writes all; what it cannot see, if ``received``, the ranks after it send."""
    files, at = [], 0
    for number, nbytes in enumerate(lengths):
        file = TargetFile(f"out{number}")
        if nbytes:
            file.add_write_item(Tensor(DTYPES["uint8"], (nbytes,), Chunks.whole(file=0, offset=at, shape=(nbytes,))))
        files.append(file)
        at += nbytes
    plan = make_plan(Target(files))
    return plan_transfers(
        plan,
        partition(plan, range(len(files)), [0]),
        np.array([[not received, *[True] * senders]]),
        rank=0,
        window=WINDOW,
        round_bytes=4 * WINDOW,
        written=NOTHING_WRITTEN,
        files_at_once=files_at_once,
    )


@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize(
    ("files_at_once", "order"), [(1, "000001223444"), (2, "010202030444"), (3, "012032040404"), (8, "012340240400")]
)
def test_files_take_turns_and_the_next_one_comes_when_one_is_complete(
    files_at_once: int, order: str, received: bool
) -> None:
    found = transfers(files_at_once, received=received).windows
    assert "".join(str(window.segment) for window in found) == order
    for number, nbytes in enumerate(LENGTHS):
        bounds = [(window.begin, window.end) for window in found if window.segment == number]
        assert bounds[0][0] == 0 and bounds[-1][1] == nbytes
        assert all(before[1] == after[0] for before, after in pairwise(bounds))
    rounds = [window.round for window in found if window.begin < window.end]
    assert rounds == sorted(rounds) and (rounds[0] == 0) is received


def test_one_round_has_windows_of_several_files() -> None:
    found = transfers(8, received=True).windows
    first = {window.segment for window in found if window.round == 0}
    assert first == {0, 2, 3}


@pytest.mark.parametrize("files_at_once", [1, 3, 8])
@pytest.mark.parametrize(("files", "senders"), [(4, 2), (3, 3)])
def test_all_who_see_a_source_send_in_every_round(files: int, senders: int, files_at_once: int) -> None:
    """Also where each file has as many windows as senders, or a multiple: their numbers alone would make one rank send
    all of a round.
    """
    lengths = [2 * senders * WINDOW] * files
    found = transfers(files_at_once, received=True, lengths=lengths, senders=senders)
    assert found.rounds > 1 and len(found.receives) == senders
    by_sender = np.stack([found.receives[sender] for sender in found.receives])
    assert (by_sender[:, :-1] > 0).all()  # a round has three windows, the last one what is left
