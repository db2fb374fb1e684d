"""``fsdpckpt convert``: any checkpoint in, full, sharded or flattened out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from fsdpckpt.cli.boundary import guarded
from fsdpckpt.cli.groups import GroupedCommand
from fsdpckpt.cli.interruption import ignore_signals
from fsdpckpt.cli.nodes import naming_the_nodes_command
from fsdpckpt.cli.options import (
    AsJson,
    BackendChoice,
    ContainerChoice,
    DeviceChoice,
    KeyTypeChoice,
    LauncherChoice,
    LayoutChoice,
    MissingStateChoice,
    PartChoice,
    Quiet,
    Source,
    StrategyChoice,
    TensorChoice,
    VerifyChoice,
    VisibilityChoice,
)
from fsdpckpt.cli.output import Output
from fsdpckpt.errors import UsageError
from fsdpckpt.standing import standing
from fsdpckpt.wording import plural, size_text

if TYPE_CHECKING:
    from fsdpckpt.converters.report import Report

__all__ = ["ConvertCommand", "convert_command"]

EXAMPLES = """\b
Examples:
  fsdpckpt convert runs/step-1000 full.pt
  fsdpckpt convert full.pt runs/resharded --to sharded --world-size 8
  fsdpckpt convert runs/step-1000 ranks --to sharded --container torch --world-size 3
  fsdpckpt convert runs/step-1000 ranks --to flattened --world-size 8 --units units.json
  fsdpckpt convert flat-ranks full.pt --unit 'layers.*' --reference model.pt --key-type name
  fsdpckpt convert runs/step-1000 weights --container safetensors --only model --dtype bfloat16
  fsdpckpt convert runs/step-1000 full.pt --dry-run
  fsdpckpt convert runs/step-1000 full.pt --resume
  fsdpckpt convert runs/step-1000 full.pt --nproc-per-node 4
  torchrun --nnodes 2 --nproc-per-node 8 ... -m fsdpckpt convert runs/step-1000 full.pt
"""

MOST_FILES = 20


class ConvertCommand(GroupedCommand):
    """``--help`` of ``convert``."""

    groups: ClassVar = {
        "What is written": (
            "to",
            "container",
            "world_size",
            "tensor",
            "mesh_device",
            "key_type",
            "flavor",
            "max_shard_size",
        ),
        "What is taken, and its names": (
            *("only", "include", "exclude", "strip_prefix", "add_prefix", "rename", "dtype", "optim_dtype"),
            *("missing_state", "buffers"),
        ),
        "Units of FSDP1's flat parameters, and the order of parameters": (
            *("units", "unit", "use_orig_params", "strategy", "param_dtype", "shard_size", "reference", "parameters"),
        ),
        "Safety": ("dry_run", "verify", "overwrite", "resume"),
        "Resources": ("max_memory", "threads", "staging"),
        "Workers": (
            *("launcher", "nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint", "device", "backend"),
            *("output_visibility", "fault_limit"),
        ),
        "Other options": ("as_json", "quiet", "help"),
    }


Globs = list[str] | None


def convert_command(
    source: Source,
    target: Annotated[
        str, typer.Argument(metavar="DST", help="What to write; must not exist yet.", show_default=False)
    ],
    *,
    to: Annotated[LayoutChoice | None, typer.Option("--to", help="Target layout; default: as the source.")] = None,
    flavor: Annotated[
        str | None,
        typer.Option("--flavor", metavar="NAME", help="Whose file names and keys are written; default: plain."),
    ] = None,
    container: Annotated[
        ContainerChoice | None,
        typer.Option("--container", help="Default: from DST's suffix, else torch for full and dcp for sharded."),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option("--world-size", min=1, metavar="N", help="Ranks of the target; for dcp how it is cut into files."),
    ] = None,
    tensor: Annotated[
        TensorChoice, typer.Option("--tensor", help="What a per-rank torch file holds.")
    ] = TensorChoice.dtensor,
    mesh_device: Annotated[
        str | None,
        typer.Option("--mesh-device", metavar="TYPE", help="Where DTensors say their mesh is: cuda, cpu, ..."),
    ] = None,
    key_type: Annotated[
        KeyTypeChoice | None,
        typer.Option("--key-type", help="What keys the optimizer's states; default: as the source."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option("--reference", metavar="PATH", help="A checkpoint with the model's names, shapes and order."),
    ] = None,
    units: Annotated[
        str | None, typer.Option("--units", metavar="FILE", help="A units file: what flattened shards do not say.")
    ] = None,
    unit: Annotated[
        Globs,
        typer.Option(
            "--unit", metavar="GLOB", help="Paths of the wrapped modules ('none': the root); may be repeated."
        ),
    ] = None,
    use_orig_params: Annotated[
        bool | None,
        typer.Option("--use-orig-params/--no-use-orig-params", help="How FSDP1 flattens.", show_default=False),
    ] = None,
    strategy: Annotated[
        StrategyChoice | None, typer.Option("--strategy", help="FSDP1's sharding strategy; default: full-shard.")
    ] = None,
    param_dtype: Annotated[
        str | None,
        typer.Option("--param-dtype", metavar="DTYPE", help="MixedPrecision.param_dtype: it decides the alignment."),
    ] = None,
    shard_size: Annotated[
        int | None,
        typer.Option("--shard-size", min=1, metavar="N", help="Ranks in one sharding group (hybrid-shard)."),
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option("--parameters", metavar="FILE", help="The order of model.parameters(): one name a line."),
    ] = None,
    missing_state: Annotated[
        MissingStateChoice | None,
        typer.Option("--missing-state", help="For parameters that have no optimizer state."),
    ] = None,
    buffers: Annotated[
        Globs,
        typer.Option("--buffers", metavar="GLOB", help="Model keys every rank holds whole; 'none': there are none."),
    ] = None,
    only: Annotated[PartChoice | None, typer.Option("--only", help="Take only this section.")] = None,
    include: Annotated[
        Globs, typer.Option("--include", metavar="GLOB", help="Take only matching parameter names; may be given again.")
    ] = None,
    exclude: Annotated[
        Globs, typer.Option("--exclude", metavar="GLOB", help="Leave out matching names; may be given again.")
    ] = None,
    strip_prefix: Annotated[
        str | None, typer.Option("--strip-prefix", metavar="PREFIX", help="Take PREFIX off the front of names.")
    ] = None,
    add_prefix: Annotated[
        str | None, typer.Option("--add-prefix", metavar="PREFIX", help="Put PREFIX before names.")
    ] = None,
    rename: Annotated[
        Globs, typer.Option("--rename", metavar="OLD=NEW", help="Rename a key or a dotted prefix; may be given again.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", metavar="DTYPE", help="Cast the model's floating tensors; default: never.")
    ] = None,
    optim_dtype: Annotated[
        str | None,
        typer.Option("--optim-dtype", metavar="DTYPE", help="Cast the optimizer's floating tensors; default: never."),
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", metavar="SIZE", help="Of safetensors files; default: 5GB.")
    ] = None,
    max_memory: Annotated[
        str | None, typer.Option("--max-memory", metavar="SIZE", help="Ceiling on copy buffers; default: 128MiB.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, metavar="N", help="Threads that copy.")] = None,
    verify: Annotated[
        VerifyChoice, typer.Option("--verify", help="How the output is checked before it appears.")
    ] = VerifyChoice.structure,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing DST.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    staging: Annotated[
        str | None,
        typer.Option(
            "--staging", metavar="DIR", help="Where a DST for an object store is put together; default: TMPDIR."
        ),
    ] = None,
    launcher: Annotated[
        LauncherChoice, typer.Option("--launcher", help="Where it runs: auto is workers if asked for or started so.")
    ] = LauncherChoice.auto,
    nproc_per_node: Annotated[
        str | None,
        typer.Option("--nproc-per-node", metavar="N|gpu|auto", help="Start so many workers here.", show_default=False),
    ] = None,
    nnodes: Annotated[int, typer.Option("--nnodes", min=1, metavar="N", help="Nodes that this is run on.")] = 1,
    node_rank: Annotated[
        int | None, typer.Option("--node-rank", min=0, metavar="N", help="This node's number, from 0.")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="Where the nodes meet: alike on all of them."),
    ] = None,
    device: Annotated[DeviceChoice, typer.Option("--device", help="What workers send from.")] = DeviceChoice.auto,
    backend: Annotated[
        BackendChoice, typer.Option("--backend", help="auto: nccl when every worker has a GPU of its own.")
    ] = BackendChoice.auto,
    output_visibility: Annotated[
        VisibilityChoice,
        typer.Option("--output-visibility", help="node: each node gets the files of the ranks it will load."),
    ] = VisibilityChoice.shared,
    fault_limit: Annotated[
        float,
        typer.Option("--fault-limit", min=1.0, metavar="SECONDS", help="Within which a lost worker ends all of them."),
    ] = 15.0,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Convert a checkpoint to another layout, container or world size, with its optimizer state.

    SRC is never written to; DST appears complete or not at all.
    """
    if launcher is LauncherChoice.local:
        standing.worker = False
    output = Output(as_json=as_json, quiet=quiet)

    def body() -> int:
        given = {
            "to": to,
            "flavor": flavor,
            "container": container,
            "world_size": world_size,
            "tensor": tensor,
            "mesh_device": mesh_device,
            "key_type": key_type,
            "reference": reference,
            "units": units,
            "unit": unit,
            "use_orig_params": use_orig_params,
            "strategy": strategy,
            "param_dtype": param_dtype,
            "shard_size": shard_size,
            "parameters": parameters,
            "missing_state": missing_state,
            "buffers": buffers,
            "only": only,
            "include": include,
            "exclude": exclude,
            "strip_prefix": strip_prefix,
            "add_prefix": add_prefix,
            "rename": _pairs(rename) if rename else None,
            "dtype": dtype,
            "optim_dtype": optim_dtype,
            "max_shard_size": max_shard_size,
            "max_memory": max_memory,
            "threads": threads,
            "verify": verify,
            "staging": staging,
            "launcher": launcher,
            "nproc_per_node": nproc_per_node,
            "nnodes": nnodes,
            "node_rank": node_rank,
            "rdzv_endpoint": rdzv_endpoint,
            "device": device,
            "backend": backend,
            "output_visibility": output_visibility,
            "fault_limit": fault_limit,
        }
        named = {name: getattr(value, "value", value) for name, value in given.items() if value is not None}
        from fsdpckpt.api import convert

        alone = launcher is not LauncherChoice.local and nproc_per_node is None and nnodes == 1 and not standing.worker
        hint = naming_the_nodes_command() if alone else nullcontext()
        with output.progress() as progress, _to_the_end(), hint:
            report = convert(
                source,
                target,
                None,
                launch=None,
                progress=progress,
                dry_run=dry_run,
                overwrite=overwrite,
                resume=resume,
                **named,
            )
        output.document(report.to_json, "convert")
        output.data(_plan(report) if dry_run else _done(report))
        return 0

    return guarded(output, body)


@contextmanager
def _to_the_end() -> Iterator[None]:
    """When a worker was lost, the launcher tells the others to stop: what happened is said all the same."""
    try:
        yield
    except BaseException:
        if standing.lost:
            ignore_signals()
        raise


def _pairs(rename: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for text in rename:
        old, equals, new = text.partition("=")
        if not equals or not old:
            raise UsageError(
                "--rename takes OLD=NEW",
                expected="OLD=NEW",
                found=text,
                next_step="for example --rename encoder=backbone",
            )
        pairs.append((old, new))
    return pairs


def _heading(report: Report) -> str:
    ranks = f", {plural(report.world_size, 'rank')}" if report.world_size else ""
    return f"{report.target}: {report.layout}, {report.container}{ranks}"


def _notes(report: Report) -> Iterator[str]:
    return (f"note: {note.message}" for note in report.notes)


def _written(report: Report) -> str:
    return f"{size_text(report.bytes_written)} in {plural(len(report.files), 'file')}"


def _workers(report: Report) -> str:
    threads = plural(report.threads, "thread")
    return f"{threads}, one process" if report.workers == 1 else f"{report.workers} processes, up to {threads} each"


def _done(report: Report) -> Iterator[str]:
    yield _heading(report)
    rate = size_text(int(report.bytes_written / report.seconds)) if report.seconds > 0 else "-"
    yield (
        f"  {plural(report.tensors, 'tensor')}, {_written(report)}, "
        f"{report.seconds:.1f} s ({rate}/s), verified: {report.verified}"
    )
    yield from _notes(report)


def _room(report: Report) -> str:
    if report.disk_free is None:
        return ""
    return f", {size_text(report.disk_free)} free" + ("" if report.disk_suffices else ": NOT ENOUGH")


def _plan(report: Report) -> Iterator[str]:
    yield f"plan: {report.source} -> {_heading(report)}"
    yield f"  read    {size_text(report.bytes_read)} of tensor data from {plural(report.source_files, 'file')}"
    yield f"  write   {_written(report)}, {plural(report.tensors, 'tensor')}"
    place = f"in {report.staged_in}" if report.staged_in is not None else f"beside {report.target}"
    yield f"  disk    {size_text(report.disk_needed)} needed {place}{_room(report)}"
    yield f"  memory  {size_text(report.peak_memory_planned)} of buffers"
    yield f"  workers {_workers(report)}"
    for file in report.files[:MOST_FILES]:
        yield f"  file    {file.path or report.target}  {size_text(file.nbytes)}"
    if len(report.files) > MOST_FILES:
        yield f"  and {len(report.files) - MOST_FILES} more files: --json lists them all"
    yield from _notes(report)
    yield "nothing was written (--dry-run)"
