"""Feeds one parser ``--inputs`` damaged files, guided by coverage (atheris, libFuzzer). ``scripts/fuzz`` runs it.

A finding is written to OUTPUT/TARGET, and ends the run with exit code 77 or 70.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time

INSTRUMENTED = ["fsdpckpt.formats", "fsdpckpt.ir", "fsdpckpt.readers", "fsdpckpt.execute.journal"]
INSTRUMENTED += ["fsdpckpt.storage.remote_store"]
READERS = ["fsdpckpt.readers"]  # of whole checkpoints: containers have targets of their own
SECONDS = 5  # of processor time
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("target", help="a name of tests/fuzz/targets.py")
    parser.add_argument("--inputs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--output", required=True)
    return parser.parse_args()


def main() -> None:
    options = arguments()
    import atheris

    whole = options.target.endswith(("-checkpoint", "-names"))
    with atheris.instrument_imports(include=READERS if whole else INSTRUMENTED):
        from tests.fuzz.targets import TARGETS, harmless
    from tests.fuzz.corpus import seeds
    from tests.fuzz.dictionary import MOST_BYTES, dictionary

    target = TARGETS[options.target]
    place = os.path.join(options.output, options.target)
    corpus = os.path.join(place, "corpus")
    os.makedirs(corpus, exist_ok=True)
    most = MOST_BYTES.get(options.target, 1024)
    for data in seeds(options.target):
        if len(data) <= most:
            with open(os.path.join(corpus, hashlib.sha1(data).hexdigest()), "wb") as file:
                file.write(data)
    words = os.path.join(place, "words")
    with open(words, "w", encoding="ascii") as file:
        file.write(dictionary(options.target))

    def one(data: bytes) -> None:
        begin = time.process_time()
        harmless(target, data)
        if time.process_time() - begin > SECONDS:
            raise TimeoutError(f"more than {SECONDS} seconds for {len(data)} bytes")

    flags = [
        f"-runs={options.inputs}",
        f"-seed={options.seed}",
        f"-dict={words}",
        f"-artifact_prefix={place}/",
        f"-timeout={12 * SECONDS}",  # by the clock, which runs faster than we do on a busy machine
        "-rss_limit_mb=512",
        "-malloc_limit_mb=512",
        f"-max_len={most}",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], corpus, *flags], one, enable_python_coverage=True)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
