"""Options that nothing is there for. The rule: what is asked for is done, or it is an error (exit code 2).

An option whose subject is absent (a dtype for an optimizer that is not taken) was meant for another checkpoint or
another target. A glob or a name that matches nothing is misspelt. ``--staging`` is no such option: it says where a DST
for a store is put together, should it be one, so that one command line serves paths and stores.
"""

from __future__ import annotations

from fsdpckpt.converters.target_spec import TargetSpec
from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Checkpoint, Section
from fsdpckpt.options import ConvertOptions

__all__ = ["refuse_without_sections"]


def refuse_without_sections(opened: Checkpoint, options: ConvertOptions, spec: TargetSpec) -> None:
    """Raises UsageError for an option about a section that is not there, not taken, or not written."""
    about: dict[Section, dict[str, object]] = {
        Section.MODEL: {"--dtype": options.dtype, "--buffers": options.buffers},
        Section.OPTIM: {
            "--optim-dtype": options.optim_dtype,
            "--key-type": options.key_type,
            "--missing-state": options.missing_state,
        },
    }
    there = {Section.MODEL: opened.model is not None, Section.OPTIM: opened.optim is not None}
    for section, given in about.items():
        named = " and ".join(option for option, value in given.items() if value)
        why = None
        if options.only not in (None, section):
            why = f"--only {options.only} leaves it out"
        elif not there[section]:
            why = f"{opened.source} has none"
        elif section is Section.OPTIM and spec.form is not None and spec.form.optim is None and spec.flavor is not None:
            why = f"the form of {spec.flavor.title} has no place for it"
        if named and why is not None:
            words = "model" if section is Section.MODEL else "optimizer"
            raise UsageError(f"{named} would do nothing: it is about the {words}, and {why}", next_step=f"drop {named}")
