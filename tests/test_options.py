"""One declaration of an option reaches the command line, the Python API, JSON and the checks."""

from __future__ import annotations

import dataclasses
import inspect
import json
import runpy
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fsdpckpt
from fsdpckpt import api
from fsdpckpt.cli import app
from fsdpckpt.command_options import DiffOptions, InspectOptions, OutputOptions, VerifyOptions
from fsdpckpt.errors import UsageError
from fsdpckpt.ir import dtypes
from fsdpckpt.option_fields import (
    SIZE,
    Group,
    Scope,
    changed,
    given,
    identity,
    option,
    parameters,
    parse_size,
    takes_options,
    with_named,
)
from fsdpckpt.options import DTYPES, FLAVORS, ConvertOptions, LaunchOptions
from fsdpckpt.producers.table import WRITABLE

KEYWORDS = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "keywords"))


@dataclass(frozen=True, slots=True)
class MoreOptions(ConvertOptions):
    """The options of ``convert`` and one more."""

    block_size: int = option("Bytes of one block.", Group.RESOURCES, default=512, kind=SIZE, scope=Scope.SAFETENSORS)


def run_with_more_options(*arguments: str) -> tuple[str, list[MoreOptions]]:
    """What a command with MoreOptions prints, and the options it gets."""
    import typer

    received: list[MoreOptions] = []

    def body(_output: object, options: MoreOptions) -> int:
        received.append(options)
        return 0

    program = typer.Typer(rich_markup_mode=None, add_completion=False)
    program.command(cls=app.HelpCommand)(app.command(body, [], [MoreOptions], "fsdpckpt.text"))
    done = CliRunner().invoke(program, [*arguments])
    return done.output, received


def test_a_new_field_is_an_option_of_the_command_line_with_its_help() -> None:
    text, _ = run_with_more_options("--help")
    assert "  --block-size SIZE" in text
    assert "Bytes of one block." in text
    _, received = run_with_more_options("--block-size", "2KiB", "--to", "full", "--rename", "a=b")
    assert [(one.block_size, one.to, one.rename) for one in received] == [(2048, "full", (("a", "b"),))]


def test_a_new_field_is_a_keyword_of_python_with_type_default_and_description() -> None:
    @takes_options(MoreOptions)
    def convert(source: str, **named: object) -> None:
        """Convert."""

    keyword = inspect.signature(convert).parameters["block_size"]
    assert (keyword.kind, keyword.annotation, keyword.default) == (keyword.KEYWORD_ONLY, "int | str", 512)
    assert "block_size: Bytes of one block." in (convert.__doc__ or "")
    assert " block_size: int | str\n" in KEYWORDS["render"](MoreOptions)
    (options,) = with_named([MoreOptions()], {"block_size": "1KiB", "only": "model"})
    assert (options.block_size, options.only) == (1024, "model")
    with pytest.raises(UsageError) as error:
        with_named([MoreOptions()], {"blocksize": 1})
    assert error.value.next_step == "did you mean block_size?"


def test_a_new_field_crosses_to_workers_and_says_where_it_applies() -> None:
    options = MoreOptions(block_size=7)
    assert changed(MoreOptions(), json.loads(json.dumps(asdict(options)))) == options
    assert given(options, Scope.SAFETENSORS) == ("--block-size",)
    assert given(options, Scope.MODEL) == given(MoreOptions(), Scope.SAFETENSORS) == ()
    assert identity(options)["block_size"] == "7"


def test_the_types_of_keywords_are_those_of_the_options() -> None:
    written = Path(api.__file__).read_text(encoding="utf-8")
    assert KEYWORDS["render"](ConvertOptions, LaunchOptions) in written, "run scripts/keywords"
    assert KEYWORDS["rewritten"](written) == written, "run scripts/keywords"


def test_convert_shows_every_option_as_a_keyword() -> None:
    signature = inspect.signature(fsdpckpt.convert)
    declared = [one.name for record in (ConvertOptions, LaunchOptions) for one in parameters(record)]
    assert list(signature.parameters) == ["source", "target", "options", "launch", "progress", *declared]
    assert all(f"    {name}: " in (fsdpckpt.convert.__doc__ or "") for name in declared)


@pytest.mark.parametrize(
    ("record", "function", "of_the_command_line"),
    [
        (InspectOptions, api.inspect, {"all_keys", "names_only", "report"}),
        (DiffOptions, api.diff, {"all_keys"}),
        (VerifyOptions, api.verify, set()),
    ],
)
def test_the_options_of_the_other_commands_are_keywords_of_their_functions(
    record: type, function: object, of_the_command_line: set[str]
) -> None:
    declared = {one.name for one in parameters(record)} - of_the_command_line
    assert declared | {"source", "a", "b", "progress"} >= set(inspect.signature(function).parameters)  # type: ignore[arg-type]
    assert declared <= set(inspect.signature(function).parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("record", [ConvertOptions, LaunchOptions, OutputOptions])
def test_every_field_is_an_option_with_one_line_of_help(record: type) -> None:
    assert [one.name for one in parameters(record)] == [field.name for field in dataclasses.fields(record)]
    for one in parameters(record):
        assert one.option.help_text.endswith(".") and "\n" not in one.option.help_text


def test_the_flavors_and_dtypes_that_are_offered_are_those_that_are_taken() -> None:
    assert sorted(FLAVORS) == sorted(WRITABLE)
    floating = {name for name, dtype in dtypes.DTYPES.items() if dtype.floating and dtype.numpy}
    assert set(DTYPES) == floating - {"float8_e8m0fnu"}


def test_none_is_the_default() -> None:
    options = ConvertOptions(dry_run=True)
    assert changed(options, {"rename": None, "world_size": None, "verify": None}) == options


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1000", 1000),
        ("128MiB", 128 << 20),
        ("128mib", 128 << 20),
        ("5GB", 5_000_000_000),
        ("5 g", 5_000_000_000),
        ("1.5KiB", 1536),
        ("2T", 2_000_000_000_000),
        ("7B", 7),
    ],
)
def test_a_size_has_decimal_or_binary_units(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "12 parsecs", "1 2MB", "-5MB", "0x10", "nan", "inf", "infGB", "nanMiB", "1_000", "1e3", "3iB"]
)
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_size(text)
