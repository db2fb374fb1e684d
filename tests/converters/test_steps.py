"""The steps of a conversion: a list that a reader sees in one place, and a decision that nothing changes."""

from __future__ import annotations

import ast
import inspect
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from fsdpckpt.converters import steps, transform
from fsdpckpt.converters.steps.draft import Step
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.ir import Container, Layout
from fsdpckpt.options import ConvertOptions

LISTS = (transform.STEPS, transform.TO_WHOLE_TENSORS, transform.TO_FULL_OR_SHARDED, transform.TO_FLATTENED)
STEPS: list[Step] = [step for each in LISTS for step in each]


@pytest.mark.parametrize("step", dict.fromkeys(STEPS), ids=lambda step: step.__name__)
def test_a_step_takes_a_draft_and_the_decision_and_says_what_it_does(step: Step) -> None:
    signature = inspect.signature(step)
    assert [each.annotation for each in signature.parameters.values()] == ["Draft", "Decision"]
    assert signature.return_annotation == "Draft"
    assert step.__doc__


def test_no_step_decides_anew_or_tries_another() -> None:
    decision = Decision(Layout.FULL, Container.TORCH, None, ConvertOptions(), directory=False)
    with pytest.raises(FrozenInstanceError):
        decision.world_size = 2  # type: ignore[misc]
    (folder,) = steps.__path__
    found: list[str] = []
    for path in [*Path(folder).glob("*.py"), Path(str(transform.__file__))]:
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.Call | ast.Assign) else ""
            if text.startswith(("replace(decision", "replace(options", "suppress(FsdpckptError", "decision =")):
                found.append(f"{path.name}: {text}")
    assert not found
