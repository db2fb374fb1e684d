"""Runs the command line in this process: the same ``main``, with what it printed and its exit code."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fsdpckpt.cli import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def call(*arguments: str | Path) -> Ran:
        monkeypatch.setattr(sys, "argv", ["fsdpckpt", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main()
        printed = capsys.readouterr()
        return Ran(int(end.value.code or 0), printed.out, printed.err)

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)


def training_state(seed: int = 1) -> dict[str, object]:
    """A model and its AdamW, as a training script saves them."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(2):
        model(torch.randn(4, 5)).square().sum().backward()
        optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 4}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "step-2.pt"
    torch.save(training_state(), path)
    return path
