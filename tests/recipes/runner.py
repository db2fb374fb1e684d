"""Runs the steps of a composite action as GitHub's runner does: expressions, ``if``, and the files by which steps talk.

What it does not know it refuses: an expression that is not understood here is not quietly taken for an empty one.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_EXPRESSION = re.compile(r"\$\{\{(.*?)\}\}", re.S)
_SHELL = ("bash", "--noprofile", "--norc", "-eo", "pipefail")


@dataclass(frozen=True)
class Step:
    """One step that was reached. ``uses``: the action that it calls, with its inputs; that action itself is not run."""

    name: str
    code: int = 0
    said: str = ""
    uses: str = ""
    inputs: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Job:
    """What became of an action. ``skipped``: the steps whose condition did not hold."""

    steps: list[Step] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    outputs: dict[str, str] = field(default_factory=dict)
    summary: str = ""

    @property
    def failed(self) -> Step | None:
        return next((step for step in self.steps if step.code), None)

    @property
    def names(self) -> list[str]:
        return [step.name for step in self.steps]


def evaluate(expression: str, contexts: Mapping[str, str]) -> str:
    """A name, a literal, ``a || b``, ``a == b`` or ``a != b``, as text; comparisons are "true" or "false"."""
    expression = expression.strip()
    for operator in ("||", "!=", "=="):
        if operator in expression:
            left, right = (evaluate(part, contexts) for part in expression.split(operator, 1))
            if operator == "||":
                return left or right
            return str((left == right) == (operator == "==")).lower()
    if literal := re.fullmatch(r"'([^']*)'", expression):
        return literal[1]
    if not re.fullmatch(r"[\w-]+(\.[\w-]+)+", expression):
        raise ValueError(f"not understood: {expression}")
    if expression not in contexts:
        raise KeyError(expression)
    return contexts[expression]


def filled(text: str, contexts: Mapping[str, str]) -> str:
    """``text`` with its expressions replaced."""
    return _EXPRESSION.sub(lambda found: evaluate(found[1], contexts), text)


def _holds(condition: str | None, contexts: Mapping[str, str], *, failed: bool) -> bool:
    if condition == "always()":
        return True
    return not failed and (condition is None or evaluate(condition, contexts) == "true")


def _assignments(path: Path) -> dict[str, str]:
    """What a step wrote to GITHUB_OUTPUT or GITHUB_ENV, in the form with ``=``."""
    lines = path.read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def inputs_of(action: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, str]:
    """The context ``inputs``: what the caller gives, and the defaults."""
    declared = action["inputs"]
    needed = {name for name, each in declared.items() if each.get("required")}
    if not needed <= given.keys() <= declared.keys():
        raise ValueError(f"given {sorted(given)}, declared {sorted(declared)}")
    return {f"inputs.{name}": given.get(name, each.get("default", "")) for name, each in declared.items()}


def run_action(
    action: Mapping[str, Any],
    given: Mapping[str, str],
    environment: Mapping[str, str],
    place: Path,
    *,
    only: Sequence[str] = (),
) -> Job:
    """Run ``action`` in the workspace ``place``. ``only``: the names of the steps to run, all by default."""
    temp = Path(environment["RUNNER_TEMP"])
    contexts = {**inputs_of(action, given), "runner.temp": str(temp)}
    environment = dict(environment)
    job = Job()
    for number, step in enumerate(action["runs"]["steps"]):
        name = step.get("name") or step["uses"]
        if only and name not in only:
            continue
        if not _holds(step.get("if"), contexts, failed=job.failed is not None):
            job.skipped.append(name)
            continue
        if "uses" in step:
            inputs = {key: filled(str(value), contexts) for key, value in step.get("with", {}).items()}
            job.steps.append(Step(name, uses=step["uses"], inputs=inputs))
            continue
        if step["shell"] != "bash":
            raise ValueError(f"{name}: a composite action's step needs its shell")
        files = {
            each: temp / f"{each.lower()}-{number}" for each in ("GITHUB_OUTPUT", "GITHUB_ENV", "GITHUB_STEP_SUMMARY")
        }
        for path in files.values():
            path.touch()
        own = {key: filled(str(value), contexts) for key, value in step.get("env", {}).items()}
        script = temp / f"step-{number}.sh"
        script.write_text(filled(step["run"], contexts))
        done = subprocess.run(
            [*_SHELL, str(script)],
            cwd=place,
            env={**environment, **own, **{key: str(path) for key, path in files.items()}},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        job.steps.append(Step(name, done.returncode, done.stdout + done.stderr))
        job.summary += files["GITHUB_STEP_SUMMARY"].read_text()
        environment |= _assignments(files["GITHUB_ENV"])
        made = _assignments(files["GITHUB_OUTPUT"])
        contexts |= {f"steps.{step['id']}.outputs.{key}": value for key, value in made.items()} if made else {}
    for name, output in action.get("outputs", {}).items():
        if job.failed is None and not only:
            job.outputs[name] = filled(output["value"], contexts)
    return job
