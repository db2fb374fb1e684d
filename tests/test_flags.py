"""Options in messages: the command line shows options, Python shows keywords, and both are made from one value."""

from __future__ import annotations

import ast
import copy
import json
import pickle
import re
import warnings
from collections.abc import Iterator
from enum import StrEnum
from itertools import count
from pathlib import Path

import pytest
import torch

import fsdpckpt
from fsdpckpt import flags
from fsdpckpt.cli.errors import error_json, error_text
from fsdpckpt.cli.output import visible
from fsdpckpt.errors import Leftover, SourceIncompleteError, TargetExistsError, UsageError
from fsdpckpt.flags import CommandFlag, Flag, Message, in_python
from fsdpckpt.ir.checkpoint import Note, Problem
from fsdpckpt.options import ConvertOptions, EachOptions, LaunchOptions
from fsdpckpt.options.commands import DiffOptions, InspectOptions, OutputOptions, UnitsOptions, VerifyOptions
from fsdpckpt.options.declare import Option, options_of

PACKAGE = Path(fsdpckpt.__file__).parent
FLAGS = {str(value): value for value in vars(flags).values() if isinstance(value, Flag) and str(value)}
OPTIONS = [
    option
    for record in (ConvertOptions, LaunchOptions, EachOptions, InspectOptions, DiffOptions, VerifyOptions, UnitsOptions)
    for option in options_of(record)
] + list(options_of(OutputOptions))


class Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("message", "command_line", "python"),
    [
        (f"add {flags.units('FILE')} of it", "add --units FILE of it", "add units=FILE of it"),
        (f"{flags.world_size(3)}, {flags.fault_limit(1.5)}", "--world-size 3, --fault-limit 1.5",
         "world_size=3, fault_limit=1.5"),
        (f"drop {flags.to} and {flags.container}", "drop --to and --container", "drop to and container"),
        (f"{flags.resume} or {flags.resume.off}", "--resume or --no-resume", "resume=True or resume=False"),
        (f"{flags.unit('layers.*')} {flags.unit('none')}", "--unit 'layers.*' --unit none",
         "unit='layers.*' unit='none'"),
        (f"{flags.units('/a b/c.json')}", "--units '/a b/c.json'", "units='/a b/c.json'"),
        (f"{flags.exclude('')} is empty", "--exclude '' is empty", "exclude='' is empty"),
        (f"{flags.mesh('dp=4,tp=2')}, {flags.mesh('NAME=SIZE,...')}", "--mesh dp=4,tp=2, --mesh NAME=SIZE,...",
         "mesh='dp=4,tp=2', mesh=NAME=SIZE,..."),
        (f"{flags.rename('OLD=NEW')}, {flags.rename('a=b')}", "--rename OLD=NEW, --rename a=b",
         "rename={OLD: NEW}, rename={'a': 'b'}"),
        (f"{flags.to(Colour.RED)} for {flags.for_('verl')}", "--to red for --for verl", "to='red' for flavor='verl'"),
        (f"{flags.wrap('a:B')}, {flags.names_only}", "--wrap a:B, --names-only", "--wrap a:B, --names-only"),
        (f"{flags.command('diff', 'a b', 'B', flags.only('optim'))}", "fsdpckpt diff 'a b' B --only optim",
         "fsdpckpt diff 'a b' B --only optim"),
        ("--units FILE in a path stays", "--units FILE in a path stays", "--units FILE in a path stays"),
    ],
    ids=count(),  # a message has a code of its own in each process
)  # fmt: skip
def test_a_message_is_shown_in_the_words_of_its_reader(message: str, command_line: str, python: str) -> None:
    assert Message(message) == command_line == Message(Message(message))
    assert in_python(message) == python == in_python(Message(message))


def test_messages_in_messages_and_copies_keep_their_options() -> None:
    inner = Message(f"add {flags.units('FILE')}")
    for outer in (f"{inner}, or {flags.overwrite}", Message(f"{inner}, or {flags.overwrite}")):
        assert in_python(outer) == "add units=FILE, or overwrite=True"
    for copied in (copy.copy(inner), copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        assert in_python(copied) == "add units=FILE" and copied == "add --units FILE"
    assert json.dumps(inner) == '"add --units FILE"'


def test_every_text_of_an_error_is_a_message_also_in_another_process() -> None:
    error = SourceIncompleteError(
        f"without {flags.units}",
        details=[f"{flags.unit('a.*')} matches nothing", "b"],
        why=f"{flags.reference('x.pt')} has none",
        next_step=f"add {flags.parameters('FILE')}",
        alternative=f"drop {flags.unit}",
        expected=f"{flags.to('full')}",
        leftover=Leftover(f"kept for {flags.resume}", f"continues without {flags.resume.off}"),
    )
    error.next_step = f"give {flags.parameters('FILE')}"
    for shown in (error, SourceIncompleteError.from_json(json.loads(json.dumps(error.to_json())))):
        assert str(shown) == (
            "without units\n  expected to='full'\n  - unit='a.*' matches nothing\n  - b\n  - kept for resume=True\n"
            "  why: reference='x.pt' has none\n  next: give parameters=FILE; then run the command again: it continues "
            "without resume=False; or, drop unit"
        )
        text = error_text(shown)
        assert "error: source incomplete: without --units\n" in text and "keyword" not in text
        assert "next: give --parameters FILE; then run the command again: it continues without --no-resume" in text
        assert json.dumps(error_json(shown)).isascii()


def test_a_name_with_the_marks_of_options_is_shown_as_it_is(tmp_path: Path) -> None:
    odd = "a\ufdd0--units\ufdd1units\ufdd2b"
    error = UsageError(f"{odd} is odd: add {flags.units(odd)}", details=[odd], found=odd)
    for shown in (error, UsageError.from_json(json.loads(json.dumps(error.to_json())))):
        assert shown.what == f"{odd} is odd: add --units '{odd}'"
        assert f"{odd} is odd: add units='a\\ufdd0--units\\ufdd1units\\ufdd2b'" in str(shown)
        assert shown.describe()["details"] == [odd]
    torch.save({odd: torch.ones(2), "\ufdd0": torch.ones(3)}, tmp_path / "odd.pt")
    assert [named.key for named in fsdpckpt.inspect(tmp_path / "odd.pt").tensors] == [odd, "\ufdd0"]


def test_notes_and_problems_are_messages() -> None:
    assert Note("unused", f"{flags.staging} had no effect").message == "--staging had no effect"
    assert in_python(Problem("names", f"see {flags.units}").message) == "see units"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: f"{option.name}")
def test_every_option_of_a_command_has_its_flag(option: Option) -> None:
    assert FLAGS[str(option.flag)] is option.flag
    if not isinstance(option.flag, CommandFlag):
        assert option.flag.keyword == option.name


def test_there_are_no_flags_of_options_that_no_command_has() -> None:
    assert set(FLAGS) == {str(option.flag) for option in OPTIONS}


def test_what_python_has_no_keyword_for_is_named_as_the_command_line_does() -> None:
    import inspect

    functions = (
        fsdpckpt.inspect,
        fsdpckpt.convert,
        fsdpckpt.convert_each,
        fsdpckpt.diff,
        fsdpckpt.api.verify,
        fsdpckpt.open,
    )  # type: ignore[attr-defined]
    keywords = {name for function in functions for name in inspect.signature(function).parameters}
    assert not {flag.keyword for flag in FLAGS.values() if not isinstance(flag, CommandFlag)} - keywords


def test_a_caller_of_python_reads_keywords_and_a_terminal_options(tmp_path: Path) -> None:
    target = tmp_path / "out.pt"
    target.write_bytes(b"something")
    source = Path(__file__).parent / "golden" / "torch-2.4" / "f2_default" / "ckpt"
    with pytest.raises(TargetExistsError) as raised:
        fsdpckpt.convert(source, target)
    assert "overwrite=True" in str(raised.value) and "--overwrite" not in str(raised.value)
    assert "--overwrite" in error_text(raised.value) and "overwrite=True" not in error_text(raised.value)
    with pytest.raises(UsageError, match=r"^max_memory: 'lots' is not a size\n  next: max_memory='128MiB', or 5GB"):
        fsdpckpt.convert(source, tmp_path / "new.pt", max_memory="lots")


def test_warnings_in_python_have_keywords(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(6.0)}, tmp_path / "full.pt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = fsdpckpt.convert(tmp_path / "full.pt", tmp_path / "out", flavor="huggingface")
    shown = "".join(str(warning.message) for warning in caught)
    assert "add reference=DIR" in shown and "--reference" not in shown
    assert any("add --reference DIR" in message for message in report.warnings)


# Literals that look like options of this program in a message: what shows them to Python cannot be wrong where there
# are none. Commands stand in backticks; ``cli`` speaks to a terminal alone, and declarations are its help.
DECLARATIONS = {"flags.py", "options/convert.py", "options/commands.py"}
OWN_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![a-z_-])")


def bare_options(source: str) -> Iterator[tuple[int, str]]:
    """The options that are text in ``source``, and their lines."""
    tree = ast.parse(source)
    documentation = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            for match in OWN_OPTION.finditer(re.sub(r"`[^`]*`|<!--.*?-->", "", node.value)):
                if match[0] in FLAGS or f"--{match[0].removeprefix('--no-')}" in FLAGS:
                    yield node.lineno, match[0]


def test_no_message_has_an_option_as_text() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {option} is text: write {{flags.{option[2:].replace('-', '_')}}}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).as_posix() not in DECLARATIONS and path.relative_to(PACKAGE).parts[0] != "cli"
        for line, option in bare_options(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_an_option_as_text_is_found() -> None:
    source = 'why = f"add --units FILE to {x}, `fsdpckpt units --from x`, --output_folder or --no-resume"\n"""--to"""'
    assert [option for _, option in bare_options(source)] == ["--units", "--no-resume"]


def test_a_text_with_and_without_an_option_is_shown_as_text() -> None:
    for text, shown in ((f"add {flags.units('FILE')}", "add --units FILE"), ("layers.0.weight", "layers.0.weight")):
        for given in (text, flags.Message(text)):
            assert f"{visible(given)}" == f"{visible(format(given))}" == shown
            assert type(flags.on_command_line(given)) is str
            assert flags.on_command_line(given) == shown
