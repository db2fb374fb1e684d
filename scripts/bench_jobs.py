"""The jobs that ``scripts/bench`` times: what is converted to what, and which programs do it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec

from bench_measure import HERE, PROGRAM, Bench, Contender, Row

SYNC = 'find "$1" -type f -exec sync {} +'
MANY = 100_000  # tensors
DCP_OF_4 = ("--to", "sharded", "--container", "dcp", "--world-size", "4")


def copying(source: str, target: str) -> Contender:
    return Contender("cp -r + fsync", ["sh", "-c", f'cp -r "$0" "$1" && {SYNC}', source, target])


def tool(direction: str, source: str, target: str) -> Contender:
    script = f'"$2" -W ignore -m torch.distributed.checkpoint.format_utils {direction} "$0" "$1" && {SYNC}'
    return Contender("format_utils + fsync", ["sh", "-c", script, source, target, sys.executable])


def converting(bench: Bench, source: str, target: str, *arguments: str) -> Contender:
    extra = bench.options.convert_options.split()
    return Contender("fsdpckpt", [PROGRAM, "convert", source, target, "--quiet", *arguments, *extra])


def dcp_full(bench: Bench) -> Row:
    source, target = bench.make("dcp", bench.options.size), bench.path("out.pt")
    contenders = [converting(bench, source, target, "--to", "full"), copying(source, target)]
    return Row("dcp -> full", source, target, [*contenders, tool("dcp_to_torch", source, target)])


def full_dcp(bench: Bench) -> Row:
    source, target = bench.make("full", bench.options.size, ".pt"), bench.path("out")
    ours = converting(bench, source, target, "--to", "sharded", "--world-size", "4")
    return Row(
        "full -> dcp of 4", source, target, [ours, copying(source, target), tool("torch_to_dcp", source, target)]
    )


def ranks_dcp(bench: Bench) -> Row:
    source, target = bench.make("ranks", bench.options.size), bench.path("out")
    ours = converting(bench, source, target, "--to", "sharded", "--world-size", "4")
    return Row("4 rank files -> dcp of 4", source, target, [ours, copying(source, target)])


def dcp_three(bench: Bench) -> Row:
    source, target = bench.make("dcp", bench.options.size), bench.path("out")
    ours = converting(bench, source, target, "--to", "sharded", "--world-size", "3")
    return Row("dcp of 4 -> dcp of 3", source, target, [ours, copying(source, target)])


def flat_full(bench: Bench) -> Row:
    source, target = bench.make("flat", bench.options.size), bench.path("out.pt")
    ours = converting(bench, source, target, "--to", "full")
    return Row("flattened of 4 -> full", source, target, [ours, copying(source, target)])


def full_flat(bench: Bench) -> Row:
    source, target = bench.make("full", bench.options.size, ".pt"), bench.path("out")
    units = bench.make("units", bench.options.size, ".json")
    ours = converting(bench, source, target, "--to", "flattened", "--world-size", "4", "--units", units)
    return Row("full -> flattened of 4", source, target, [ours, copying(source, target)])


def flat_three(bench: Bench) -> Row:
    source, target = bench.make("flat", bench.options.size), bench.path("out")
    ours = converting(bench, source, target, "--to", "flattened", "--world-size", "3")
    return Row("flattened of 4 -> flattened of 3", source, target, [ours, copying(source, target)])


def accelerate(bench: Bench) -> Row:
    whole = bench.derive("accelerate", bench.make("dcp", bench.options.size))
    source, target = os.path.join(whole, "pytorch_model_fsdp_0"), bench.path("out")
    ours = converting(bench, source, target, "--flavor", "huggingface")
    script = f'"$2" merge-weights "$0" "$1" && {SYNC}'
    program = os.path.join(os.path.dirname(sys.executable), "accelerate")
    theirs = Contender("accelerate merge-weights + fsync", ["sh", "-c", script, source, target, program])
    return Row("accelerate's weights of 4 -> safetensors", source, target, [ours, copying(source, target), theirs])


def lightning(bench: Bench) -> Row:
    source, target = bench.derive("fabric", bench.make("dcp", bench.options.size)), bench.path("out.ckpt")
    ours = converting(bench, source, target, "--flavor", "fabric", "--to", "full")
    script = f'"$2" -W ignore -m lightning.fabric.utilities.consolidate_checkpoint "$0" --output_file "$1" && {SYNC}'
    theirs = Contender(
        "Lightning's consolidate_checkpoint + fsync", ["sh", "-c", script, source, target, sys.executable]
    )
    return Row("Lightning's directory of 4 -> one file", source, target, [ours, copying(source, target), theirs])


def zero_weights(bench: Bench) -> Row:
    """DeepSpeed's own script runs where DeepSpeed is installed."""
    source, target = bench.make("zero", bench.options.size), bench.path("out")
    ours = converting(bench, source, target, "--flavor", "huggingface")
    row = Row("ZeRO of 4 -> safetensors", source, target, [ours, copying(source, target)])
    if find_spec("deepspeed") is not None:
        run = "import sys; from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as run; "
        run += "run(sys.argv[1], sys.argv[2], safe_serialization=True, tag='.')"
        script = f'"$2" -W ignore -c "$3" "$0" "$1" && {SYNC}'
        row.contenders.append(
            Contender("zero_to_fp32 + fsync", ["sh", "-c", script, source, target, sys.executable, run])
        )
    return row


def dcp_universal(bench: Bench) -> Row:
    """Beside a copy of the same files: there is one for each weight and each state."""
    source, target = bench.make("dcp", bench.options.size), bench.path("out")
    ours = converting(bench, source, target, "--flavor", "deepspeed-universal")
    written = bench.derive("deepspeed-universal", source)
    return Row("dcp of 4 -> DeepSpeed universal", source, target, [ours, copying(written, target)])


def universal_full(bench: Bench) -> Row:
    source = bench.derive("deepspeed-universal", bench.make("dcp", bench.options.size))
    target = bench.path("out.pt")
    return Row(
        "DeepSpeed universal -> full", source, target, [converting(bench, source, target), copying(source, target)]
    )


def one_tensor(bench: Bench) -> Row:
    source, target = bench.make("one-tensor", 4 * 10**9), bench.path("out.pt")
    contenders = [converting(bench, source, target, "--to", "full"), copying(source, target)]
    return Row("dcp -> full, one tensor of 4 GB", source, target, contenders)


def inspect_thousand(bench: Bench) -> Row:
    source = bench.make("many", 1000, ".pt")
    return Row(
        "inspect of 1,000 tensors", source, bench.path("none"), [Contender("fsdpckpt", [PROGRAM, "inspect", source])]
    )


def layout(bench: Bench) -> Row:
    command = [sys.executable, os.path.join(HERE, "bench_layout.py")]
    name = "layout of 1,000 units on 4,096 ranks"
    return Row(name, bench.path("none"), bench.path("none"), [Contender("fsdpckpt", command)])


def help_text(bench: Bench) -> Row:
    return Row("--help", bench.path("none"), bench.path("none"), [Contender("fsdpckpt", [PROGRAM, "--help"])])


def hundred_thousand(bench: Bench) -> Row:
    source, target = bench.make("many", MANY, ".pt"), bench.path("out")
    ours = converting(bench, source, target, *DCP_OF_4)
    row = Row("100,000 tensors, full -> dcp", source, target, [ours, copying(source, target)])
    row.note = "per-tensor"
    return row


def hundred_thousand_full(bench: Bench) -> Row:
    source, target = bench.make("many", MANY, ".pt"), bench.path("out.pt")
    row = Row("100,000 tensors, full -> full", source, target, [converting(bench, source, target, "--to", "full")])
    row.contenders.append(copying(source, target))
    row.note = "per-tensor"
    return row


def hundred_thousand_dcp(bench: Bench) -> Row:
    source, target = bench.derive("plain", bench.make("many", MANY, ".pt"), *DCP_OF_4), bench.path("out")
    row = Row("100,000 tensors, dcp -> dcp", source, target, [converting(bench, source, target, *DCP_OF_4)])
    row.contenders.append(copying(source, target))
    row.note = "per-tensor"
    return row


def journal(bench: Bench) -> Row:
    """What the journal costs: the same conversion with a journal that is synced, and with one that never is."""
    source, target = bench.make("full", bench.options.size, ".pt"), bench.path("out")
    words = ["convert", source, target, "--quiet", "--to", "sharded", "--world-size", "4"]
    run = "from fsdpckpt.execute import journal; {}; from fsdpckpt.cli import main; main()"
    with_it, without = (run.format(code) for code in ("journal.SYNC_SECONDS", "journal.SYNC_SECONDS = 1e6"))
    contenders = [
        Contender("fsdpckpt", [sys.executable, "-c", with_it, *words]),
        Contender("without syncing the journal", [sys.executable, "-c", without, *words]),
    ]
    return Row("journal, full -> dcp of 4", source, target, contenders, note="journal")


def threads(bench: Bench) -> Row:
    """How the rate grows with threads: best in a ``--directory`` of tmpfs, where no disk is waited for."""
    source, target = bench.make("dcp", bench.options.size), bench.path("out.pt")
    contenders = [converting(bench, source, target, "--to", "full"), copying(source, target)]
    for count in sorted({1, 2, os.cpu_count() or 1}):
        one = converting(bench, source, target, "--to", "full", "--threads", str(count))
        contenders.append(Contender(f"fsdpckpt --threads {count}", one.command))
    return Row("dcp -> full", source, target, contenders)


def links(bench: Bench) -> Row:
    """A conversion that changes names and metadata only. ``--directory`` decides which file system it is on."""
    source, target = bench.make("dcp", bench.options.size), bench.path("out")
    contenders = [converting(bench, source, target, "--flavor", "accelerate"), copying(source, target)]
    for link in ("auto", "hardlink"):
        command = [*contenders[0].command, "--link", link]
        contenders.append(Contender(f"fsdpckpt --link {link}", command))
    return Row("dcp of 4 -> accelerate's of 4", source, target, contenders)


def scale(ranks: int) -> Callable[[Bench], Row]:
    def row(bench: Bench) -> Row:
        source = bench.make_scale(ranks)
        command = [PROGRAM, "inspect", source, "--quiet"]
        return Row(f"inspect 405B x {ranks:,}", source, bench.path("none"), [Contender("fsdpckpt", command)])

    return row


def scale_ranks(bench: Bench) -> Row:
    source = bench.make("many-ranks", 4000)
    command = [PROGRAM, "inspect", source, "--quiet"]
    return Row("inspect, files of 64 ranks", source, bench.path("none"), [Contender("fsdpckpt", command)])


def scale_load(bench: Bench) -> Row:
    source = bench.make_scale(4096)
    command = [
        sys.executable,
        "-c",
        "import sys, fsdpckpt; fsdpckpt.StorageReader(sys.argv[1]).read_metadata()",
        source,
    ]
    return Row("StorageReader on 4,096 ranks", source, bench.path("none"), [Contender("fsdpckpt", command)])


def scale_chunks(bench: Bench) -> Row:
    source = bench.make_scale(512, "--columns", "16", "--items")
    command = [PROGRAM, "inspect", source, "--quiet", "--ranks", "--json"]
    return Row("inspect --ranks --json, 512 ranks", source, bench.path("none"), [Contender("fsdpckpt", command)])


def scale_verify(bench: Bench) -> Row:
    source = bench.make_scale(512, "--columns", "16", "--items")
    command = [PROGRAM, "verify", source, "--quiet"]
    return Row("verify, 512 ranks", source, bench.path("none"), [Contender("fsdpckpt", command)])


def scale_plan(container: str, ranks: int = 64, world_size: int = 512) -> Callable[[Bench], Row]:
    def row(bench: Bench) -> Row:
        source, target = bench.make_scale(ranks, "--columns", "16", "--items"), bench.path("none")
        command = [PROGRAM, "convert", source, target, "--quiet", "--dry-run", "--world-size", str(world_size)]
        command += ["--container", container]
        return Row(
            f"plan {ranks} ranks -> {container} of {world_size}", source, target, [Contender("fsdpckpt", command)]
        )

    return row


FEW = 8_000  # entries of the optimizer and the model
NAMED_FLAVORS = (
    "automodel",
    "llamafactory",
    "nemo-rl",
    "olmo-core",
    "prime-rl",
    "skyrl",
    "slime",
    "torch_checkpointing",
    "torchtune",
    "transformers-distributed",
    "veomni",
)
PARALLEL = ("autotp", "pipeline", "experts", "autoep", "megatron-torch", "megatron-buffers")


def named(flavor: str) -> Callable[[Bench], Row]:
    """What it takes to read a framework's own layout: headers alone, and everything."""

    def row(bench: Bench) -> Row:
        if flavor == "nanotron":
            source = bench.make("nanotron", FEW)
        elif flavor in PARALLEL:
            source = bench.make_parallel(flavor, FEW)
        else:
            source = bench.derive(flavor, bench.make("many", FEW, ".pt"), "--world-size", "4")
        target = bench.path("out.pt")
        look = Contender("inspect", [PROGRAM, "inspect", source, "--quiet"])
        whole = converting(bench, source, target, "--to", "full", "--flavor", "plain")
        whole.name = "convert"
        return Row(flavor, source, target, [look, whole])

    return row


SCALE, NAMED = "scale", "named"  # each stands for all rows that begin with it; they are made on request only
ROWS: dict[str, Callable[[Bench], Row]] = {
    "dcp-full": dcp_full,
    "full-dcp": full_dcp,
    "ranks-dcp": ranks_dcp,
    "dcp-3": dcp_three,
    "flat-full": flat_full,
    "full-flat": full_flat,
    "flat-3": flat_three,
    "accelerate": accelerate,
    "lightning": lightning,
    "zero": zero_weights,
    "universal": dcp_universal,
    "universal-full": universal_full,
    "one-tensor": one_tensor,
    "inspect": inspect_thousand,
    "layout": layout,
    "help": help_text,
    "journal": journal,
    "threads": threads,
    "links": links,
    "many": hundred_thousand,
    "many-full": hundred_thousand_full,
    "many-dcp": hundred_thousand_dcp,
    "scale-64": scale(64),
    "scale-512": scale(512),
    "scale-4096": scale(4096),
    "scale-ranks": scale_ranks,
    "scale-load": scale_load,
    "scale-chunks": scale_chunks,
    "scale-plan-dcp": scale_plan("dcp"),
    "scale-plan-ranks": scale_plan("torch"),
    "scale-plan-512": scale_plan("dcp", 512, 384),
    "scale-plan-4096": scale_plan("dcp", 4096, 3072),
    "scale-verify": scale_verify,
    **{f"named-{flavor}": named(flavor) for flavor in (*NAMED_FLAVORS, "nanotron", *PARALLEL)},
}
