"""A checkpoint of odd sizes, what undisturbed runs make of it, and the library that puts faults into system calls."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.faults.runs import convert
from tests.oracle.session import Oracle

FULL = ["--to", "full"]
DCP = ["--to", "sharded", "--world-size", "3"]
SHIM = Path(__file__).parent / "shim.c"


def state(seed: int) -> dict[str, object]:
    """13 MB, none of whose parts are equal."""
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    model = {f"layers.{number}.weight": tensor(901 + number, 397) for number in range(3)} | {"bias": tensor(7)}
    states = {
        number: {"step": torch.tensor(float(seed)), "exp_avg": tensor(*value.shape), "exp_avg_sq": tensor(*value.shape)}
        for number, value in enumerate(model.values())
    }
    groups = [{"lr": 0.1, "params": list(range(len(model)))}]
    return {"model": model, "optimizer": {"state": states, "param_groups": groups}, "epoch": seed}


@pytest.fixture(scope="session")
def saved(oracle: Oracle) -> Path:
    """The checkpoint, which tests copy."""
    return oracle.once("faults-source", lambda directory: torch.save(state(1), directory / "source.pt")) / "source.pt"


@pytest.fixture
def source(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copyfile(saved, tmp_path / "source.pt"))


@pytest.fixture
def whole(source: Path, tmp_path: Path) -> Callable[..., Path]:
    """``whole(*options)``: what an undisturbed run makes, made once."""

    def make(*options: str) -> Path:
        path = tmp_path / "-".join(["whole", *(option.strip("-") for option in options)])
        if not path.exists():
            done = convert(source, path, *options)
            assert done.code == 0, done.err
        return path

    return make


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The library to preload."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler: faults in system calls are not tested")
    library = tmp_path_factory.mktemp("shim") / "shim.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SHIM, "-ldl"], check=True)
    return str(library)
