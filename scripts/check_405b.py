"""Converts a Llama 3 405B with narrow matrices from one file to many ranks, to others and back; compares all elements.

    PYTHONPATH=. python scripts/check_405b.py [--ranks 512,384] [--columns 2] [--directory DIR]

It has every tensor, name and chunk of the model with AdamW (1.75 million chunks on 512 ranks); only the width of the
matrices is cut. The values are random. PyTorch loads what the last ranks would load, and the last full file must hold
the elements of the first. It takes minutes, and a few times 0.3 GB of disk for 2 columns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator

from bench_measure import measure
from bench_scale_make import GROUP, Size, parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="512,384", help="the world sizes, one after the other")
    parser.add_argument("--columns", type=int, default=2)
    parser.add_argument("--directory", help="where temporary files go")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        original = source = f"{directory}/full.pt"
        apart(make, original, parameters(126, arguments.columns))
        for ranks in map(int, arguments.ranks.split(",")):
            target = f"{directory}/{ranks}"
            convert(source, target, "--to", "sharded", "--world-size", str(ranks))
            source = target
        apart(check_directory, original, source)
        target = f"{directory}/again.pt"
        convert(source, target, "--to", "full")
        apart(check_file, original, target)


def apart(step: Callable[..., None], *arguments: object) -> None:
    """Run ``step`` in a process of its own: what it holds would count as memory of what is started here later."""
    process = multiprocessing.get_context("spawn").Process(target=step, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(1)


def convert(source: str, target: str, *options: str) -> None:
    run = measure([sys.executable, "-m", "fsdpckpt", "convert", source, target, *options], limit=3600)
    print(f"{target}: {run.seconds:.0f} s, {run.cpu:.0f} s of CPU, {run.peak_bytes >> 20} MiB", flush=True)


def make(path: str, shapes: dict[str, Size]) -> None:
    """Save a full checkpoint by name with AdamW's state."""
    import torch

    generator = torch.Generator().manual_seed(405)

    def random(shape: Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    states = {
        name: {"step": torch.tensor(float(number)), "exp_avg": random(shape), "exp_avg_sq": random(shape)}
        for number, (name, shape) in enumerate(shapes.items())
    }
    model = {name: random(shape) for name, shape in shapes.items()}
    groups = [{**GROUP, "params": list(shapes)}]
    torch.save({"model": model, "optimizer": {"state": states, "param_groups": groups}}, path)


def check_directory(original: str, directory: str) -> None:
    """What PyTorch loads from ``directory`` into tensors of the right shapes is what ``original`` holds."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.utils._pytree import tree_map_only

    expected = torch.load(original)
    state = tree_map_only(torch.Tensor, torch.empty_like, expected)
    dcp.load(state, checkpoint_id=directory, no_dist=True)
    compare(expected, state, f"PyTorch's load of {directory}")


def check_file(original: str, path: str) -> None:
    import torch

    compare(torch.load(original), torch.load(path), path)


def compare(expected: object, found: object, what: str) -> None:
    import torch

    first, second = dict(leaves(expected)), dict(leaves(found))
    wrong = sorted(map(str, first.keys() ^ second.keys()))
    for path in first.keys() & second.keys():
        one, other = first[path], second[path]
        equal = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        wrong += [] if equal else [str(path)]
    if wrong:
        sys.exit(f"{what}: {len(wrong)} of {len(first)} entries differ, first {wrong[:3]}")
    print(f"{what}: all {len(first)} entries are equal", flush=True)


def leaves(value: object, path: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], object]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if entries is None:
        yield path, value
    else:
        for key, entry in entries:
            yield from leaves(entry, (*path, key))


if __name__ == "__main__":
    main()
