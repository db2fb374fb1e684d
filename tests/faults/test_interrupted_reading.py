"""Ctrl-C while enormous tensors are read: the command ends at the next block, not at a tensor's end."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

ENORMOUS = 1 << 39  # bytes, of a hole in a file: many minutes of reading on any machine


@pytest.fixture
def enormous(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    half = ENORMOUS // 2
    form = {"dtype": "F32", "shape": [half // 4096, 1024]}
    tensors = {"one": {**form, "data_offsets": [0, half]}, "other": {**form, "data_offsets": [half, ENORMOUS]}}
    header = json.dumps(tensors).encode()  # two, so that threads read them, which no signal reaches
    try:
        path.write_bytes(struct.pack("<Q", len(header)) + header)
        os.truncate(path, 8 + len(header) + ENORMOUS)
    except OSError:
        pytest.skip("the file system here has no room for a hole of 512 GiB: interrupted reading is not tested")
    return path


@pytest.mark.parametrize(
    "command",
    [["verify", "A", "--digests"], ["verify", "A", "--finite"], ["diff", "A", "A"], ["inspect", "A", "--stats"]],
    ids=["digests", "finite", "diff", "stats"],
)
def test_a_signal_ends_reading_at_the_next_block(enormous: Path, command: list[str]) -> None:
    words = [str(enormous) if word == "A" else word for word in command]
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdpckpt", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 120
        while _read(process.pid) < 200_000_000:  # well within the tensors
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, "nothing is read"
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, said
    assert "interrupted" in said


def _read(process: int) -> int:
    """Bytes the process has read."""
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])
