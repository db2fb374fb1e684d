"""``fsdpckpt convert``: any checkpoint in, full, sharded or flattened out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Annotated

import typer

from fsdpckpt.cli.boundary import guarded
from fsdpckpt.cli.convert_text import done_lines, plan_lines
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
from fsdpckpt.errors import TargetUnwritableError, UsageError
from fsdpckpt.process_role import standing

__all__ = ["convert_command"]

Globs = list[str] | None
# Named here, as --help imports nothing; a test compares it with the table of flavors.
FLAVORS = (
    "plain (default), accelerate, fabric, huggingface, lightning, lightning-model-parallel, torchtitan, "
    "torchtitan-old, trainer, verl"
)


def convert_command(
    source: Source,
    target: Annotated[
        str,
        typer.Argument(metavar="DST", help="A path or an object store's URL; must not exist yet.", show_default=False),
    ],
    *,
    to: Annotated[LayoutChoice | None, typer.Option("--to", help="Target layout; default: as the source.")] = None,
    flavor: Annotated[
        str | None,
        typer.Option("--flavor", metavar="NAME", help=f"Whose file names and keys are written: {FLAVORS}."),
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
        typer.Option("--missing-state", help="For parameters without optimizer state: refuse, write zeros, leave out."),
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
            "--staging",
            metavar="DIR",
            help="Where a DST for an object store is put together (default: TMPDIR); a path needs none.",
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
        _refuse_memory(target)
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
        output.data(plan_lines(report) if dry_run else done_lines(report))
        return 0

    return guarded(output, body)


def _refuse_memory(target: str) -> None:
    if target.startswith("memory://"):
        raise TargetUnwritableError(
            f"{target} is the memory of this program: what is written there is gone when it ends",
            file=target,
            next_step="give a path, or the URL of an object store (s3://, gs://, abfs://)",
        )


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
