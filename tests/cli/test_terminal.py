"""Tables and progress on a terminal, in a log, with --quiet and with --json."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fsdpckpt import flags
from fsdpckpt.cli.errors import show_error
from fsdpckpt.cli.output import Lines, Streams, table_lines
from fsdpckpt.errors import SourceError
from fsdpckpt.text import JsonText, bytes_text, duration_text, plural, size_text


def at_a_terminal(*arguments: str | Path, columns: int = 120) -> str:
    """What the program prints when all its streams are one terminal."""
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    command = [sys.executable, "-m", "fsdpckpt", *map(str, arguments)]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment)
    os.close(child)
    printed = b""
    end = time.monotonic() + 60
    try:
        while time.monotonic() < end:
            if select.select([parent], [], [], 1.0)[0]:
                try:
                    data = os.read(parent, 65536)
                except OSError:  # the other end is closed
                    break
                if not data:
                    break
                printed += data
    finally:
        process.kill()
        process.wait()
        os.close(parent)
    return printed.decode()


def test_a_terminal_gets_a_drawn_table_and_a_bar(saved: Path) -> None:
    drawn = at_a_terminal("inspect", saved, "--section", "model")
    assert "\x1b[1m" in drawn
    rows = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn).splitlines()
    assert any(row.split()[:4] == ["model", "2.weight", "float32", "[3,"] for row in rows)
    bar = at_a_terminal("verify", saved, "--digests")
    assert "━" in bar
    assert " is \x1b[1;32mwhole\x1b[0m: 24 tensors" in bar
    assert "━" not in at_a_terminal("verify", saved, "--digests", "-q")


def test_a_name_wider_than_the_terminal_is_cut_in_its_middle_and_no_line_is_folded(tmp_path: Path) -> None:
    name = "a.very.long.name.of.a.module." * 3 + "weight"
    torch.save({name: torch.randn(2, 3)}, tmp_path / "long.pt")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", at_a_terminal("inspect", tmp_path / "long.pt", columns=60))
    (row,) = [line for line in shown.splitlines() if "24 B" in line and "weight" in line and "model:" not in line]
    assert len(row) <= 60
    assert row.startswith("a.…")
    assert "…" in row


def test_a_log_gets_lines_with_bytes_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("fsdpckpt.cli.output.time.monotonic", lambda: clock[0])
    shown: list[str] = []
    lines = Lines(shown.append)
    lines.begin("a quick stage", 100)
    lines.advance(100)
    lines.end()
    assert shown == []
    lines.begin("copy", 100 << 30)
    clock[0] = 100.0
    lines.advance(10 << 30)
    assert shown == ["copy: 10.0 GiB of 100.0 GiB (10 %), 102.4 MiB/s, 15 min 0 s left"]
    lines.end()
    assert len(shown) == 2


def test_a_bar_stays_on_one_line_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(drawn, "isatty", lambda: True)
    for name, value in (("stderr", drawn), ("stdout", drawn)):
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with Streams(as_json=False, quiet=False).progress() as progress:
        progress.begin("verify", 999 << 30)
        for _ in range(8):
            time.sleep(0.06)
            progress.advance(100 << 30)
    frames = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn.getvalue()))
    told = [frame for frame in frames if frame.strip()]
    assert any(re.search(r"of 999\.0 GiB \(\d+ %\) .* \d+ (s|min \d+ s) left", frame) for frame in told), told
    assert all(frame.startswith("verify ") and len(frame) <= 80 for frame in told), told


def test_quiet_keeps_data_and_errors_and_json_is_all_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    output = Streams(as_json=False, quiet=True)
    output.message("message")
    output.data(["data"])
    output.error(["error"])
    assert capsys.readouterr() == ("data\n", "error\n")
    output = Streams(as_json=True, quiet=False)
    output.data(["data"])
    output.document(lambda: {"key": "é"})
    assert capsys.readouterr().out == '{"key": "é"}\n'


def test_tables_align_numbers_right() -> None:
    rows = [["key", "bytes"], ["w", "12"], ["bias", "7"]]
    assert table_lines(rows, right={1}) == ["key   bytes", "w        12", "bias      7"]


@pytest.mark.parametrize(
    ("terminal", "variables", "coloured"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colours_are_for_terminals_unless_a_variable_says_otherwise(
    terminal: bool, variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stderr", stream)
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    show_error(Streams(as_json=False, quiet=True), SourceError("it is \x1b[2J torn"))
    first = stream.getvalue().splitlines()[0]
    label, rest = ("\x1b[1;31merror:\x1b[0m", " ") if coloured else ("error:", " ")
    assert first.startswith(label + rest)
    assert "\x1b[2J" not in first


def test_sizes_times_and_counts_read_well() -> None:
    assert [size_text(n) for n in (0, 1023, 1024, 1536, 1 << 20, (1 << 30) - 1, 5 << 40)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "1.0 GiB", "5.0 TiB",
    ]  # fmt: skip
    assert bytes_text(1) == "1 byte" and bytes_text(9_999) == "9,999 bytes"
    assert bytes_text(3_843_594_918) == "3.6 GiB (3,843,594,918 bytes)"
    times = ["0.0 s", "59.9 s", "1 min 0 s", "6 min 36 s", "2 h 5 min"]
    assert [duration_text(seconds) for seconds in (0.04, 59.94, 59.96, 396, 7_500)] == times
    assert (plural(1, "tensor"), plural(1234567, "tensor")) == ("1 tensor", "1,234,567 tensors")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("long_ones", [False, True])
def test_a_long_list_in_a_document_is_printed_whole(
    monkeypatch: pytest.MonkeyPatch, encoding: str, long_ones: bool
) -> None:
    rows = [{"key": f"\u00e4 {number}", "why": f"add {flags.units('FILE')}"} for number in range(600)]
    items = [
        JsonText(json.dumps(row, ensure_ascii=False)) if long_ones and at % 100 == 7 else row
        for at, row in enumerate(rows)
    ]
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    Streams(as_json=True, quiet=False).document(lambda: {"none": iter([]), "rows": iter(items), "end": 1})
    printed = stream.buffer.getvalue()  # type: ignore[attr-defined]
    expected = [{**row, "why": "add --units FILE"} for row in rows]
    assert json.loads(printed) == {"none": [], "rows": expected, "end": 1}
