"""Runs the command line in this process: the same ``main``, with what it printed and its exit code."""

from __future__ import annotations

import shutil
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


@pytest.fixture(scope="session")
def trained_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "step-2.pt"
    torch.save(training_state(), path)
    return path


@pytest.fixture
def saved(trained_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(trained_file, tmp_path))


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns, without colours."""
    monkeypatch.setattr("fsdpckpt.cli.output._is_terminal", lambda stream: True)
    for name, value in (("COLUMNS", "80"), ("NO_COLOR", "1"), ("TERM", "dumb")):
        monkeypatch.setenv(name, value)


@pytest.fixture
def screen(run: Run, narrow: None) -> Callable[..., str]:
    """What one sees of a command on a terminal of 80 columns, without colours: stdout, then stderr, then the code."""

    def show(*arguments: str | Path) -> str:
        done = run(*arguments)
        shown = f"{done.out}{done.err}exit {done.code}\n"
        assert all(len(line) <= 80 for line in shown.splitlines()), shown
        return shown

    return show


def at_step(step: int, layers: int = 3) -> dict[str, object]:
    """A model and its AdamW with ids at a step, in numbers that every machine computes alike."""
    names = ["embed.weight", *(f"layers.{n}.{part}.weight" for n in range(layers) for part in ("attn.q_proj", "norm"))]
    model = {name: torch.full((4, 2), 1.0 + step / 1000) for name in names}
    states = {"exp_avg": 0.5, "exp_avg_sq": 0.25}
    state = {
        number: {
            "step": torch.tensor(float(step)),
            **{name: torch.full((4, 2), value * (1 + step / 100)) for name, value in states.items()},
        }
        for number in range(len(names))
    }
    group = {"lr": 0.1 / step, "betas": (0.9, 0.95), "params": list(range(len(names)))}
    rng = {"python": (3, tuple(range(step, step + 40)), None)}
    return {
        "model": model,
        "optimizer": {"state": state, "param_groups": [group]},
        "scheduler": {"last_epoch": step},
        "rng": rng,
    }
