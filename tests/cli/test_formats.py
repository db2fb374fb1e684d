"""``formats``, ``version`` and ``help``: what people type first."""

from __future__ import annotations

import pytest

import fsdpckpt
from fsdpckpt.producers.table import FLAVORS, WRITABLE
from tests.cli.conftest import Run
from tests.cli.test_schemas import checked


def test_formats_lists_every_flavor_and_whether_it_is_written(run: Run) -> None:
    done = run("formats", "--json")
    rows = checked(done.out)["formats"]
    assert isinstance(rows, list)
    flavors = {row["name"]: row for row in rows if row["kind"] == "flavor"}
    assert flavors.keys() == {"plain", *(flavor.name for flavor in FLAVORS)}
    assert {name for name, row in flavors.items() if row["writes"]} == set(WRITABLE)
    assert {row["name"] for row in rows if row["kind"] == "container"} == {"torch", "dcp", "safetensors"}
    table = run("formats")
    assert table.code == 0 and len(table.out.splitlines()) == 1 + len(rows)


@pytest.mark.parametrize("words", [("--version",), ("-V",), ("version",)])
def test_each_way_to_ask_for_the_version_shows_it(run: Run, words: tuple[str, ...]) -> None:
    done = run(*words)
    assert (done.code, done.out) == (0, f"fsdpckpt {fsdpckpt.__version__}\n")


def test_help_is_the_help_of_the_program_or_of_a_command(run: Run) -> None:
    assert run("help").out.strip() == run("--help").out.strip()
    assert run("help", "verify").out.strip() == run("verify", "--help").out.strip()
    done = run("help", "convrt")
    assert done.code == 2 and "no such command: convrt" in done.err
