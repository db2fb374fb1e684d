"""Words one error from the fatal problems of a checkpoint: what they are together, why, and what to do next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence, Set

from fsdpckpt import flags
from fsdpckpt.errors import SourceCorruptError, SourceError, SourceIncompleteError, SourceUnsupportedError
from fsdpckpt.ir.checkpoint import Problem, Section

INCOMPLETE = frozenset({"incomplete", "missing-rank", "missing-key", "missing-file", "missing-section"})
UNSUPPORTED = frozenset({"aliased-states", "flattened", "flattened-lost"})

ALIASED_WHY = (
    "FSDP1 with use_orig_params=True, trained on CPU and gathered with offload_to_cpu=True, hands out every state of a "
    "parameter as a view of one reused buffer: the other states were overwritten before they reached the disk"
)

ALIASED_NEXT = "save again with FullOptimStateDictConfig(offload_to_cpu=False), or as SHARDED_STATE_DICT"


def fatal(problems: Iterable[Problem], *, source: str) -> SourceError:
    """One error that lists every fatal problem; their kinds decide its class.

    Raises ValueError if none is fatal: check before.
    """
    wrong = [problem for problem in problems if problem.fatal]
    if not wrong:
        raise ValueError("no fatal problem")
    first = wrong[0]
    error, what, why, next_step = _describe(wrong, source)
    return error(
        f"{source} {what}",
        details=[problem.message for problem in wrong],
        why=why,
        next_step=next_step,
        file=first.file,
        key=first.key,
        rank=first.rank,
    )


_ONLY_MODEL = f"{flags.only('model')} converts the model alone"

_STATES_OF_ONE_RANK = {
    "d_numerator": "Prodigy (prodigyopt) without fsdp_in_use=True sums over its own shard alone, so each rank learned "
    "a different step size; checkpoints saved with fsdp_in_use=True can be converted",
    "RMS": "CAME keeps the root mean square of a rank's own slice, which says nothing about other slices",
}
"""Why optimizer states of this name differ between ranks."""


def _describe(wrong: Sequence[Problem], source: str) -> tuple[type[SourceError], str, str | None, str | None]:
    """For an error about these problems its class, what is wrong with ``source``, why, and what to do next."""
    kinds = {problem.kind for problem in wrong}
    if "quantized" in kinds:
        what = "holds optimizer states that are quantized in blocks that depend on how ranks cut them"
        why = "a scale belongs to a block of one rank's slice, and other slices have other blocks"
        return SourceUnsupportedError, what, why, _ONLY_MODEL
    if kinds & INCOMPLETE:
        return SourceIncompleteError, "is not whole", *_why_incomplete(wrong[0], source)
    if kinds == {"flattened"}:
        return SourceUnsupportedError, "holds shards whose contents are not known for certain", None, None
    if kinds <= UNSUPPORTED:
        aliased = "has lost optimizer states", ALIASED_WHY, ALIASED_NEXT
        other = "has lost data", "the way it was saved lost it", None
        return SourceUnsupportedError, *(aliased if "aliased-states" in kinds else other)
    return _contradiction(wrong, kinds, source)


def _contradiction(
    wrong: Sequence[Problem], kinds: Set[str], source: str
) -> tuple[type[SourceError], str, str | None, str | None]:
    """What ``_describe`` returns for things that are all there and do not fit together."""
    if kinds == {"shape"}:
        return SourceCorruptError, "contains a model and an optimizer of different shapes", *_why_misshapen(wrong)
    if kinds == {"config"}:
        why = "a shard of the model is missing, or one rank's part was saved; or config.json is another model's"
        next_step = f"copy the missing files; if config.json does not belong to these weights, add {flags.ignore_file}"
        return SourceCorruptError, "does not contain the model that its config.json describes", why, next_step
    if kinds == {"parameter-order"}:
        what = "does not say which parameter each of its optimizer's states belongs to"
        why = "an id, or a place in a list, may be one parameter for the optimizer or a rank, and another for the model"
        return SourceCorruptError, what, why, _ONLY_MODEL
    why = "files of different saves were mixed, or bytes were damaged"
    if kinds == {"replica"}:
        names = [(problem.key or "").rpartition(".")[2] for problem in wrong]
        reasons = [_STATES_OF_ONE_RANK[name] for name in names if name in _STATES_OF_ONE_RANK]
        if reasons:
            what = "holds optimizer states that each rank keeps for itself"
            return SourceUnsupportedError, what, reasons[-1], _ONLY_MODEL
        why = (
            "files of different saves were mixed; or the optimizer keeps states that only make sense on their own rank"
        )
    return SourceCorruptError, "contradicts itself", why, _verify(source)


def _why_misshapen(wrong: Sequence[Problem]) -> tuple[str, str]:
    """Why shapes differ, and what to do next."""
    short = {problem.section for problem in wrong}
    if short == {Section.MODEL}:
        why = "a shard of the model is missing, or each rank saved what it holds of a tensor as if it were the tensor"
        return why, (
            f"copy the missing files, or save the model again with get_model_state_dict; {flags.only('optim')} "
            "converts the optimizer alone"
        )
    if short == {Section.OPTIM}:
        why = "the states are what one rank holds of them, saved as if they were whole; or they are of another model"
        return why, _ONLY_MODEL
    return "the files are of different jobs, or the model was changed after the optimizer was saved", (
        "give a model and an optimizer of one save"
    )


def _why_incomplete(first: Problem, source: str) -> tuple[str, str]:
    """Why something is missing, and what to do next. ``first``: the first of the problems."""
    if first.kind == "missing-section":
        present = Section.MODEL if first.section is Section.OPTIM else Section.OPTIM
        next_step = f"copy the missing files there, or convert what there is: add {flags.only(present)}"
        return "the copy or the save did not finish", next_step
    if first.kind == "missing-rank" and first.file == source:
        directory = shlex.quote(os.path.dirname(source) or ".")
        why = "each rank writes its own file, and this is one of them"
        return why, f"give the directory with the files of all ranks: {directory}"
    return "a rank's file was not copied, or the save did not finish", _verify(source)


def _verify(source: str) -> str:
    return f"fsdpckpt verify {shlex.quote(source)}"
