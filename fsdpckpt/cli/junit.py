"""Writes the result of ``verify`` as JUnit XML (``--junit``), which CI systems show as tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape, quoteattr

from fsdpckpt import flags
from fsdpckpt.cli.output import visible
from fsdpckpt.storage.documents import Document
from fsdpckpt.text import plural
from fsdpckpt.version import __version__

if TYPE_CHECKING:
    from fsdpckpt.errors import FsdpckptError
    from fsdpckpt.ir.checkpoint import Problem
    from fsdpckpt.verify.integrity import Verification

RESULTS = Document(
    flags.junit,
    "test result",
    '<?xml version="1.0" encoding="UTF-8"?>\n<!-- test results of fsdpckpt verify -->\n',
    (".xml",),
    "an XML file",
)
TENSORS, FINITE = "every element of every tensor is there once", "no NaN and no Inf"
CHECKS: dict[str, tuple[str, ...]] = {
    "every file is there and complete": ("incomplete", "missing-file", "missing-rank", "truncated", "unreadable"),
    "checksums": ("checksum", "digest", "manifest"),
    TENSORS: ("length", "missing-key", "overlap", "outside", "shape"),
    "copies of a tensor are equal": ("copies", "master", "replica", "rank-mismatch"),
    "the optimizer is complete, and its steps agree": ("missing-section", "parameter-order", "state", "step"),
    FINITE: ("not-finite",),
}
"""The name of each test, and the kinds of problems that it finds. ``TENSORS`` has all kinds that are not listed."""

_LISTED = frozenset(kind for kinds in CHECKS.values() for kind in kinds)


def write_results(
    path: str, source: str, result: Verification | FsdpckptError, *, searched: bool, seconds: float
) -> None:
    """Write one test for each check, and one for ``--for``.

    ``result``: the error if ``source`` could not be read. ``searched``: whether NaN and Inf were. Raises TargetError.
    """
    cases = [*_cases(result, searched=searched)]
    counted = {word: sum(f"<{word}" in case for case in cases) for word in ("failure", "error", "skipped")}
    totals = f'tests="{len(cases)}" failures="{counted["failure"]}" errors="{counted["error"]}"'
    suite = f"<testsuite name={_attribute(source)} {totals}"
    lines = [
        f'<testsuites name="fsdpckpt verify" {totals} time="{seconds:.3f}">',
        f'{suite} skipped="{counted["skipped"]}" time="{seconds:.3f}">',
        f'<properties><property name="fsdpckpt" value={_attribute(__version__)}/></properties>',
        *cases,
        "</testsuite>",
        "</testsuites>",
    ]
    RESULTS.write(path, source, RESULTS.mark + "".join(f"{line}\n" for line in lines))


def _cases(result: Verification | FsdpckptError, *, searched: bool) -> Iterator[str]:
    from fsdpckpt.verify.integrity import Verification

    if not isinstance(result, Verification):
        yield _case("readable", _finding("error", result.title, result.what, result.text.split("\n")))
        return
    yield _case("readable", "")
    for name, kinds in CHECKS.items():
        takes_others = name == TENSORS
        problems: list[Problem] = []
        for problem in result.problems:
            if problem.kind in kinds or (takes_others and _is_other(problem)):
                problems.append(problem)
        if name == FINITE and not searched:
            yield _case(name, '<skipped message="add --finite"/>')
        elif problems:
            message = problems[0].message if len(problems) == 1 else plural(len(problems), "problem")
            texts = [f"{problem.kind}: {problem.message}" for problem in problems]
            yield _case(name, _finding("failure", problems[0].kind, message, texts))
        else:
            yield _case(name, "")
    resumption = result.resumption
    if resumption is not None:
        name = f"{resumption.flavor} resumes on {plural(resumption.world_size, 'rank')}"
        texts = [*resumption.missing, *([f"next: {resumption.command}"] if resumption.command is not None else [])]
        yield _case(name, "" if resumption.resumes else _finding("failure", "resume", resumption.missing[0], texts))


def _is_other(problem: Problem) -> bool:
    return problem.kind not in _LISTED


def _case(name: str, content: str) -> str:
    head = f'<testcase classname="fsdpckpt.verify" name={_attribute(name)}'
    return f"{head}>{content}</testcase>" if content else f"{head}/>"


def _finding(word: str, kind: str, message: str, lines: Sequence[str]) -> str:
    text = "\n".join(escape(visible(line)) for line in lines)
    return f"<{word} type={_attribute(kind)} message={_attribute(message)}>{text}</{word}>"


def _attribute(text: str) -> str:
    return quoteattr(visible(text))
