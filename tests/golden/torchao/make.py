"""Makes ``states.tar.xz`` beside this file: states that torchao saved, on 4 ranks and on 2, as torch files and as DCP.

With torchao on PYTHONPATH: ``python -m tests.golden.torchao.make``.
"""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

from tests.golden.torchao.net import KINDS, save_dcp, save_ranks

HERE = Path(__file__).parent


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        for kind in KINDS:
            for world_size in (4, 2):
                save_ranks(kind, world_size, Path(made, kind, f"ranks-{world_size}"))
            save_dcp(kind, 4, Path(made, kind, "dcp-4"))
        with tarfile.open(HERE / "states.tar.xz", "w:xz") as archive:
            archive.add(made, ".")


if __name__ == "__main__":
    main()
