"""``diff SRC DST`` right after ``convert SRC DST`` finds no difference, for what every producer's own library saved."""

from __future__ import annotations

from pathlib import Path

import pytest

import fsdpckpt
from tests.e2e.flavors.conftest import LibraryOf

# Another layout, fewer ranks, more ranks, and the form of another framework.
TARGETS = ({"to": "full"}, {"to": "sharded", "world_size": 2}, {"to": "sharded", "world_size": 5}, {})
FOREIGN: dict[str, dict[str, object]] = {
    "lightning": {"flavor": "huggingface"},
    "torchtitan": {"flavor": "trainer", "world_size": 2},
    "transformers": {"flavor": "torchtitan", "world_size": 2},
    "verl": {"flavor": "lightning", "world_size": 2},
}
# verl's FSDP1 optimizer files do not name the wrapped modules, and its units are beside none of them.
WITHOUT_UNITS = ("verl1", "verl1h")


@pytest.mark.parametrize("producer", sorted(FOREIGN))
def test_nothing_differs_right_after_a_conversion(producer: str, library: LibraryOf, tmp_path: Path) -> None:
    saved = library(producer).saved
    sources = sorted(path for path in saved.iterdir() if path.name not in WITHOUT_UNITS and path.suffix != ".json")
    assert len(sources) > 1
    for number, source in enumerate(sources):
        options: dict[str, object] = dict(TARGETS[number % len(TARGETS)] or FOREIGN[producer])
        target = tmp_path / (f"{number}.pt" if options.get("to") == "full" else str(number))
        if options.get("to") == "full":
            options["flavor"] = "plain"
        fsdpckpt.convert(source, target, **options)  # type: ignore[arg-type]
        result = fsdpckpt.diff(source, target)
        differ = [(entry.sigil, entry.key) for entry in result.entries if entry.sigil != "=" and entry.counts]
        assert differ == [], (source.name, options)
        assert result.same
        assert result.count("=") > 10
