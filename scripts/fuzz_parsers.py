"""Coverage-guided fuzzing of one parser with atheris (libFuzzer): damaged files until ``--inputs`` were tried.

An input is a finding when anything but an error of ``fsdpckpt.errors`` leaves the parser, when it takes longer than
5 seconds or more than 512 MB. A finding is written to ``fuzz-run/TARGET/``, and ends the run with exit code 77 or 70.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time

SECONDS = 5  # of processor time
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("target", help="a name of tests/fuzz/targets.py")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", default=os.path.join(ROOT, "fuzz-run"))
    return parser.parse_args()


def main() -> None:
    options = arguments()
    import atheris

    with atheris.instrument_imports(include=["fsdpckpt.containers", "fsdpckpt.ir", "fsdpckpt.readers"]):
        from tests.fuzz.targets import TARGETS, harmless
    from tests.fuzz.corpus import seeds

    if options.target not in TARGETS:
        sys.exit(f"no target {options.target}: there are {', '.join(TARGETS)}")
    target = TARGETS[options.target]
    place = os.path.join(options.output, options.target)
    corpus = os.path.join(place, "corpus")
    os.makedirs(corpus, exist_ok=True)
    for data in seeds(options.target):
        with open(os.path.join(corpus, hashlib.sha256(data).hexdigest()[:16]), "wb") as file:
            file.write(data)

    def one(data: bytes) -> None:
        begin = time.process_time()
        harmless(target, data)
        if time.process_time() - begin > SECONDS:
            raise TimeoutError(f"more than {SECONDS} seconds for {len(data)} bytes")

    flags = [
        f"-runs={options.inputs}",
        f"-seed={options.seed}",
        f"-artifact_prefix={place}/",
        f"-timeout={12 * SECONDS}",  # by the clock, which runs faster than we do on a busy machine
        "-rss_limit_mb=512",
        "-malloc_limit_mb=512",
        "-max_len=16384",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], corpus, *flags], one, enable_python_coverage=True)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
