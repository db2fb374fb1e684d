"""Decides what a conversion writes, and refuses options that do not apply to it.

Layout, container and world size come from the options, DST's suffix and the source.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches

from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.vocabulary import Container, Layout, Section
from fsdpckpt.option_fields import Scope, given
from fsdpckpt.options import DTYPES, ConvertOptions, LaunchOptions, TensorForm
from fsdpckpt.producers.forms import PLAIN, Flavor, Form
from fsdpckpt.producers.table import WRITABLE, flavor_named

__all__ = [
    "TargetSpec",
    "check_options",
    "make_target_spec",
    "refuse_flat_options",
    "refuse_launch_options",
    "refuse_section_options",
    "refuse_target_options",
    "refuse_worker_options",
    "writable_flavor",
]

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS_SUFFIX = ".safetensors"

# What people call them, and what torch does.
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_SHORT |= {"fp64": "float64", "double": "float64", "fp8": "float8_e4m3fn", "float8": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """What is written. ``world_size``: ranks of the target, None to keep the source's cuts (DCP) or for one file.

    ``directory``: whether DST is a directory. ``flavor``, ``form``: the producer whose names it gets; None is plain.
    """

    layout: Layout
    container: Container
    world_size: int | None
    tensor: TensorForm
    directory: bool
    flavor: Flavor | None = None
    form: Form | None = None


def make_target_spec(target: str, options: ConvertOptions, source_layout: Layout) -> TargetSpec:
    """The spec of one conversion. Raises UsageError when the options contradict each other or DST's suffix."""
    suffix = os.path.splitext(target.rstrip("/"))[1]
    if options.flavor is not None and options.flavor != PLAIN:
        return _producer_spec(suffix, options, source_layout)
    container = _container(suffix, options, source_layout)
    layout = _layout(container, suffix, options, source_layout)
    if options.world_size is not None and options.world_size < 1:
        raise UsageError("--world-size counts ranks", expected="1 or more", found=str(options.world_size))
    if layout is Layout.FULL and options.world_size is not None:
        if options.to is None and container is not Container.SAFETENSORS and suffix not in TORCH_SUFFIXES:
            raise UsageError(
                "--world-size says how to shard, and the source is full, so that the target will be full too",
                next_step=f"add --to sharded, or drop --world-size {options.world_size}",
            )
        raise UsageError(
            f"--world-size says for how many ranks to shard, and {_why_full(container, suffix)} is not sharded",
            next_step="drop --world-size",
        )
    ranks = layout is Layout.FLATTENED or (layout is Layout.SHARDED and container is Container.TORCH)
    if ranks and options.world_size is None:
        raise UsageError("per-rank files need to know for how many ranks", next_step="add --world-size N")
    if layout is Layout.FLATTENED and container is not Container.TORCH:
        raise UsageError(
            f"flattened shards are written as torch files, one a rank, and --container says {container}",
            next_step="drop --container",
        )
    _refuse_unused(layout, container, options, source_layout)
    one_file = layout is Layout.FULL and (container is Container.TORCH or suffix == SAFETENSORS_SUFFIX)
    return TargetSpec(layout, container, options.world_size, options.tensor, directory=not one_file)


def _why_full(container: Container, suffix: str) -> str:
    if container is Container.SAFETENSORS:
        return "a safetensors target"
    return f"one file ({suffix})" if suffix in TORCH_SUFFIXES else "--to full"


def _refuse_unused(layout: Layout, container: Container, options: ConvertOptions, source_layout: Layout) -> None:
    refuse_target_options(options, layout=layout, container=container, source_layout=source_layout)
    if options.max_shard_size < 1:
        raise UsageError(
            "--max-shard-size is too small", found=str(options.max_shard_size), next_step="--max-shard-size 5GB"
        )


def _container(suffix: str, options: ConvertOptions, source_layout: Layout) -> Container:
    named = None
    if suffix in TORCH_SUFFIXES:
        named = Container.TORCH
    elif suffix == SAFETENSORS_SUFFIX:
        named = Container.SAFETENSORS
    if options.container is not None:
        if named is not None and named is not options.container:
            raise UsageError(
                f"DST ends in {suffix}, which names the container {named}, and --container says {options.container}",
                next_step="drop --container, or give DST another name",
            )
        return options.container
    if named is not None:
        return named
    return Container.DCP if (options.to or source_layout) is Layout.SHARDED else Container.TORCH


def _layout(container: Container, suffix: str, options: ConvertOptions, source_layout: Layout) -> Layout:
    if container is Container.SAFETENSORS:
        if options.to not in (None, Layout.FULL):
            raise UsageError(
                f"safetensors files hold whole tensors, so --to {options.to} does not fit",
                next_step="--to full, or a DST and a --container that are not safetensors",
            )
        return Layout.FULL
    layout = options.to
    if layout is None:
        layout = Layout.FULL if suffix in TORCH_SUFFIXES else source_layout
    if layout is not Layout.FULL and suffix in TORCH_SUFFIXES:
        raise UsageError(
            f"--to {layout} writes a directory, and DST ends in {suffix}",
            next_step="give DST a name without a suffix",
        )
    return layout


def writable_flavor(name: str) -> Flavor:
    """The flavor of that name. Raises UsageError when none is written under it."""
    flavor = flavor_named(name)
    if flavor is None or not flavor.forms:
        meant = get_close_matches(name, WRITABLE, n=1, cutoff=0.3)
        raise UsageError(
            f"--flavor {name} is " + ("read, and not written" if flavor is not None else "an unknown flavor"),
            expected=", ".join(WRITABLE),
            found=name,
            next_step=f"--flavor {meant[0]}" if meant and flavor is None else "choose one of these",
        )
    return flavor


def _producer_spec(suffix: str, options: ConvertOptions, source_layout: Layout) -> TargetSpec:
    """The spec of a conversion with ``--flavor``: the producer's first form that fits what is asked for."""
    flavor = writable_flavor(options.flavor or "")
    form = _form(flavor, suffix, options, source_layout)
    ranks = form.layout is Layout.FLATTENED or (form.layout is Layout.SHARDED and form.container is Container.TORCH)
    if ranks and options.world_size is None:
        raise UsageError("per-rank files need to know for how many ranks", next_step="add --world-size N")
    if form.optim is not None and options.key_type not in (None, form.key_type):
        keys = f"keys its optimizer by {form.key_type}" if form.key_type else "has keys of its own in this form"
        raise UsageError(
            f"--key-type {options.key_type} does not fit {flavor.title}, which {keys}",
            next_step="drop --key-type",
        )
    _refuse_unused(form.layout, form.container, options, source_layout)
    return TargetSpec(
        form.layout, form.container, options.world_size, options.tensor, form.directory, flavor=flavor, form=form
    )


def _form(flavor: Flavor, suffix: str, options: ConvertOptions, source_layout: Layout) -> Form:
    one_file = suffix in (*TORCH_SUFFIXES, SAFETENSORS_SUFFIX)
    fitting = _fitting(flavor, one_file, options)
    if not fitting:
        forms = "; ".join(_words(form) for form in flavor.forms)
        raise UsageError(
            f"{flavor.title} does not save what is asked for",
            expected=forms,
            found=_words_of(suffix if one_file else "", options),
            next_step=_what_to_drop(flavor, one_file, options),
        )
    return next((form for form in fitting if form.layout is source_layout), fitting[0])


def _fitting(flavor: Flavor, one_file: bool, options: ConvertOptions) -> list[Form]:  # noqa: FBT001  # of DST's name
    return [
        form
        for form in flavor.forms
        if options.to in (None, form.layout)
        and options.container in (None, form.container)
        and not (one_file and form.directory)
        and not (options.world_size is not None and form.layout is Layout.FULL)
    ]


def _what_to_drop(flavor: Flavor, one_file: bool, options: ConvertOptions) -> str:  # noqa: FBT001
    """The least change after which one of the forms fits."""
    without = {
        "drop --container": (one_file, replace(options, container=None)),
        "drop --to": (one_file, replace(options, to=None)),
        "drop --world-size": (one_file, replace(options, world_size=None)),
        "give DST a name without a suffix": (False, options),
        "drop --to and --container": (one_file, replace(options, to=None, container=None)),
        "drop --to, --container and --world-size": (
            one_file,
            replace(options, to=None, container=None, world_size=None),
        ),
    }
    fits = [what for what, (file, changed) in without.items() if _fitting(flavor, file, changed)]
    return fits[0] if fits else "drop --to, --container and --world-size, and give DST a name without a suffix"


def _words(form: Form) -> str:
    return f"--to {form.layout} --container {form.container}" + ("" if form.directory else ", one file")


def _words_of(suffix: str, options: ConvertOptions) -> str:
    given = [f"--to {options.to}"] if options.to is not None else []
    given += [f"--container {options.container}"] if options.container is not None else []
    given += [f"--world-size {options.world_size}"] if options.world_size is not None else []
    return ", ".join([*given, *([f"a DST ending in {suffix}"] if suffix else [])]) or "nothing in particular"


def check_options(options: ConvertOptions) -> None:
    """Raises UsageError for a flavor or a dtype that cannot be written. Nothing is opened."""
    if options.flavor is not None and options.flavor != PLAIN:
        writable_flavor(options.flavor)
    for option, name in (("--dtype", options.dtype), ("--optim-dtype", options.optim_dtype)):
        if name is not None and name not in DTYPES:
            meant = _SHORT.get(name, name.removeprefix("torch."))
            raise UsageError(
                f"{option} {name} is not a floating-point dtype",
                expected=", ".join(DTYPES),
                found=name,
                next_step=f"{option} {meant if meant in DTYPES else 'bfloat16'}",
            )


def refuse_target_options(
    options: ConvertOptions, *, layout: Layout, container: Container, source_layout: Layout
) -> None:
    """Raises UsageError for an option that a target of this layout and container has no use for."""
    per_rank = layout is Layout.SHARDED and container is Container.TORCH
    flat = Layout.FLATTENED in (layout, source_layout)
    keyed = flat or options.key_type is not None
    for scope, applies, instead in (
        (Scope.PER_RANK_FILES, per_rank, "--to sharded --container torch"),
        (Scope.DTENSORS, flat or per_rank, "--to sharded --container torch"),
        (Scope.KEYED, keyed, "--key-type name"),
        (Scope.SHARDED_OR_KEYED, layout is Layout.SHARDED or keyed, "--to sharded or --key-type"),
        (Scope.SAFETENSORS, container is Container.SAFETENSORS, "--container safetensors"),
    ):
        for option in given(options, scope) if not applies else ():
            raise UsageError(
                f"{option} has no effect on a target that is {layout}, {container}",
                next_step=f"drop {option}, or add {instead}",
            )


def refuse_section_options(
    options: ConvertOptions, opened: Checkpoint, *, flavor: Flavor | None, form: Form | None
) -> None:
    """Raises UsageError for an option about a section that is not there, not taken, or not written.

    ``flavor`` and ``form``: the framework whose files are written, and which of its forms.
    """
    written = flavor is None or form is None or form.optim is not None
    for section, scope, words, present in (
        (Section.MODEL, Scope.MODEL, "model", opened.model is not None),
        (Section.OPTIM, Scope.OPTIMIZER, "optimizer", opened.optim is not None),
    ):
        why = None
        if options.only not in (None, section):
            why = f"--only {options.only} leaves it out"
        elif not present:
            why = f"{opened.source} has none"
        elif section is Section.OPTIM and flavor is not None and not written:
            why = f"the form of {flavor.title} has no place for it"
        names = " and ".join(given(options, scope)) if why is not None else ""
        if names:
            raise UsageError(f"{names} would do nothing: it is about the {words}, and {why}", next_step=f"drop {names}")


def refuse_flat_options(options: ConvertOptions, source: str, *, has_flat: Callable[[], bool]) -> None:
    """Raises UsageError for options about FSDP1's flat parameters where there are none.

    ``has_flat``: whether the source or the target has any; called only if there are such options.
    """
    # Keys and names need the order of the parameters, which a units file has.
    ordered = options.key_type or options.include or options.exclude or options.missing_state
    names = [option for option in given(options, Scope.FLAT_PARAMETERS) if option != "--units" or not ordered]
    if names and not has_flat():
        listed = " and ".join(names)
        raise UsageError(
            f"{listed} {'describes' if len(names) == 1 else 'describe'} flat parameters, and neither "
            f"{source} nor the target has any",
            next_step=f"drop {listed}, or add --to flattened",
        )


def refuse_worker_options(launch: LaunchOptions) -> None:
    """Raises UsageError for options on how workers meet and communicate, for a run of one process."""
    names = given(launch, Scope.WORKERS)
    if names:
        are = f"{names[0]} is" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are"
        raise UsageError(
            f"{are} for workers, and there are none",
            next_step=f"add --nproc-per-node N, or drop {' and '.join(names)}",
        )


def refuse_launch_options(launch: LaunchOptions, why: str) -> None:
    """Raises UsageError for options that start workers, where ``why`` says that none are started."""
    for option in given(launch, Scope.LAUNCH):
        raise UsageError(f"{option} starts workers, and {why}", next_step=f"drop {option}")
