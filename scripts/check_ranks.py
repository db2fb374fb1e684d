"""Compares every chunk that is read from a ``.metadata`` with what PyTorch planned, for any number of ranks.

    PYTHONPATH=. python scripts/check_ranks.py 4096

PyTorch's planner runs for one rank after the other, in a fake process group: minutes for thousands of ranks. The test
suite does the same for 512.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from fsdpckpt.formats.dcp import parse_metadata
from fsdpckpt.storage.local import LocalFile
from tests.readers.test_dcp_scale import rows_of, saved


def main() -> None:
    ranks = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as directory:
        expected = saved(Path(directory), ranks)
        rows = list(rows_of(parse_metadata(LocalFile(f"{directory}/.metadata"))))
    found = {(key, box): file for key, box, file in rows}
    if found != expected or len(found) != len(rows):
        wrong = sorted(place for place in found.keys() | expected.keys() if found.get(place) != expected.get(place))
        sys.exit(f"{len(wrong)} chunks of {ranks} ranks are not what PyTorch planned, first {wrong[:3]}")
    print(f"{len(rows)} chunks of {ranks} ranks are what PyTorch planned")


if __name__ == "__main__":
    main()
