"""Says what a directory is that has a checkpoint of its own and those of steps: a run, unless its form says otherwise.

The file may be the last of the steps, an export, or what is left of another run. Nothing tells, so the user is asked.
Trainers that write the final model beside the checkpoints of its training have a form of their own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from fsdpckpt import flags
from fsdpckpt.errors import SeveralCheckpointsError
from fsdpckpt.ir.origin import Origin
from fsdpckpt.readers.candidates import MAX_CANDIDATES, proposed
from fsdpckpt.readers.model_config import HUGGING_FACE_WEIGHTS
from fsdpckpt.readers.protocol import Part
from fsdpckpt.storage.sources import Sources, relative_path
from fsdpckpt.text import natural, some_of

_STEP_OF_TRAINER = re.compile(r"checkpoint-\d+")


def are_of_one_run(parts: Sequence[Part], steps: Sequence[str]) -> bool:
    """Whether ``parts`` are the final model that the Trainer writes beside the checkpoints of its ``steps``: weights
    for Hugging Face's libraries, and nothing else that may hold a state.
    """
    with_state = [part for part in parts if not part.optional]
    named = all(HUGGING_FACE_WEIGHTS.fullmatch(part.name) for part in with_state)
    return bool(with_state) and named and all(_STEP_OF_TRAINER.fullmatch(step.rpartition("/")[2]) for step in steps)


def beside_steps(
    path: str, parts: Sequence[Part], steps: Sequence[str], source: str, sources: Sources
) -> SeveralCheckpointsError:
    """The error for the directory ``path``, which holds ``parts`` and the directories ``steps``, each a checkpoint."""
    ordered = sorted(steps, key=natural)
    labels = sorted((part.label for part in parts if not part.extras), key=natural)
    own = labels[0] if len(labels) == 1 and labels[0].rstrip("/") != path.rstrip("/") else path
    names = some_of([relative_path(step, path) for step in ordered], MAX_CANDIDATES)
    other = shlex.quote(own)
    if own == path:
        globs = _globs([relative_path(step, source) for step in ordered])
        ignored = [f"{flags.ignore_file(glob)}" for glob in globs]
        other = f"add {' '.join(ignored)} to read what is beside the steps"
    return SeveralCheckpointsError(
        f"{path} contains a checkpoint of its own, and those of {names}",
        details=[*labels, *ordered],
        most_shown=MAX_CANDIDATES + 1,
        why="the one beside them may be the last of these steps, an export, or of another run",
        next_step=f"name the one to read, for example {shlex.quote(proposed(path, ordered, sources))}; or {other}",
        file=path,
        checkpoints=[own, *ordered],
    )


def _globs(steps: Sequence[str]) -> list[str]:
    """Globs that match ``steps``, one for each form of their names."""
    return list(dict.fromkeys(re.sub(r"\d+", "*", step) for step in steps))


def with_final_model(origin: Origin) -> SeveralCheckpointsError:
    """The checkpoints of a run with its final model, which is at ``origin``, for a caller that lists them."""
    return SeveralCheckpointsError(
        f"{origin.source} contains the final model of a run and its checkpoints",
        checkpoints=[origin.directory, *sorted(origin.steps, key=natural)],
    )
