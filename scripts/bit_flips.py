#!/usr/bin/env python
"""Change one bit in every byte of a tiny checkpoint of every form, one at a time: is it found, or does it not matter?

Prints a table for docs/guarantees.md. With fsdpckpt.json every changed byte has to be found by ``convert`` and by
``verify``; without it by the checksums of torch records, or it makes no difference. safetensors alone has none. Nowhere
may ``convert`` silently write what ``verify`` finds. Exits 1 where that does not hold.

Both are called in this process, in memory where /dev/shm is, which takes a hundredth of a second for each byte.

    python scripts/bit_flips.py [--sample N] [FORM ...]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

from tests.verify.bit_flips import (
    FORMS,
    PROTECTED,
    VERIFY_ALONE,
    WITHOUT_CHECKSUMS,
    WRITTEN,
    flip_each,
    make,
    places,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("forms", nargs="*", default=FORMS)
    parser.add_argument("--sample", type=int, help="so many bytes of each form instead of all")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # nothing waits for a disk there
    wrong = False
    for form in arguments.forms:
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            whole = make(form, Path(folder))
            chosen = places(whole)
            if arguments.sample is not None:
                chosen = random.Random(form).sample(chosen, min(arguments.sample, len(chosen)))
            outcomes = list(flip_each(whole, chosen, Path(folder)))
        kinds = Counter(outcome.kind for outcome in outcomes)
        counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common())
        print(f"{form}: {len(chosen):,} bytes: {counts}", flush=True)
        for kind in kinds.keys() - {"found", "harmless"}:
            files = Counter(outcome.file for outcome in outcomes if outcome.kind == kind)
            print(f"    {kind}: {', '.join(f'{count} in {file}' for file, count in files.most_common(5))}", flush=True)
        expected = {"found"} if form in WRITTEN else PROTECTED if form not in WITHOUT_CHECKSUMS else set(kinds)
        wrong |= not set(kinds) <= expected or VERIFY_ALONE in kinds
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
