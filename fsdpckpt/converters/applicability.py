"""Refuses options that do not apply to this source, to this target or to this way to run.

What is asked for is done, or it is an error (exit code 2): an option that does not apply, as a dtype for an optimizer
that is left out, was meant for another checkpoint or another target. Where an option applies is declared with it
(``option_fields.Scope``).
"""

from __future__ import annotations

from collections.abc import Callable

from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.vocabulary import Container, Layout, Section
from fsdpckpt.option_fields import Scope, given
from fsdpckpt.options import ConvertOptions, LaunchOptions
from fsdpckpt.producers.forms import Flavor, Form

__all__ = [
    "refuse_flat_options",
    "refuse_launch_options",
    "refuse_section_options",
    "refuse_target_options",
    "refuse_worker_options",
]


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
