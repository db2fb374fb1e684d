"""One declaration of an option reaches the command line, the Python API, JSON and the checks."""

from __future__ import annotations

import dataclasses
import inspect
import json
import runpy
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import fsdpckpt
from fsdpckpt import api
from fsdpckpt.cli import app
from fsdpckpt.errors import UsageError
from fsdpckpt.ir import Layout, dtypes
from fsdpckpt.options import CASTABLE_DTYPES, FLAVORS, ConvertOptions, LaunchOptions, LinkMode, VerifyLevel
from fsdpckpt.options.commands import (
    DiffOptions,
    InspectOptions,
    OutputOptions,
    VerifyOptions,
    takes_options,
    with_keywords,
)
from fsdpckpt.options.declare import Heading, OptionRecord, Scope, given, option, options_of, output_options
from fsdpckpt.options.kinds import SIZE, parse_size
from fsdpckpt.producers.table import WRITABLE

KEYWORDS = runpy.run_path(str(Path(__file__).parent.parent / "scripts" / "keywords"))


@dataclass(frozen=True, slots=True)
class MoreOptions(ConvertOptions):
    """The options of ``convert`` and one more."""

    block_size: int = option("Bytes of one block.", Heading.RESOURCES, default=512, kind=SIZE, scope=Scope.SAFETENSORS)


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
    (options,) = with_keywords([MoreOptions()], {"block_size": "1KiB", "only": "model"})
    assert (options.block_size, options.only) == (1024, "model")
    with pytest.raises(UsageError) as error:
        with_keywords([MoreOptions()], {"blocksize": 1})
    assert error.value.next_step == "did you mean block_size?"


def test_a_new_field_crosses_to_workers_and_says_where_it_applies() -> None:
    options = MoreOptions(block_size=7)
    assert MoreOptions(**json.loads(json.dumps(asdict(options)))) == options
    assert [str(flag) for flag in given(options, Scope.SAFETENSORS)] == ["--block-size"]
    assert given(options, Scope.MODEL) == given(MoreOptions(), Scope.SAFETENSORS) == ()
    assert output_options(options)["block_size"] == "7"


def test_the_types_of_keywords_are_those_of_the_options() -> None:
    written = Path(api.__file__).read_text(encoding="utf-8")
    assert KEYWORDS["render"](ConvertOptions, LaunchOptions) in written, "run scripts/keywords"
    assert KEYWORDS["rewritten"](written) == written, "run scripts/keywords"


def test_convert_shows_every_option_as_a_keyword() -> None:
    signature = inspect.signature(fsdpckpt.convert)
    declared = [each.name for record in (ConvertOptions, LaunchOptions) for each in options_of(record)]
    assert list(signature.parameters) == ["source", "target", "options", "launch", "progress", *declared]
    assert all(f"    {name}: " in (fsdpckpt.convert.__doc__ or "") for name in declared)


@pytest.mark.parametrize(
    ("record", "function", "of_the_command_line"),
    [
        (InspectOptions, api.inspect, {"all_keys", "names_only", "report"}),
        (DiffOptions, api.diff, {"all_keys", "report"}),
        (VerifyOptions, api.verify, {"junit"}),
    ],
)
def test_the_options_of_the_other_commands_are_keywords_of_their_functions(
    record: type[OptionRecord], function: object, of_the_command_line: set[str]
) -> None:
    declared = {each.name for each in options_of(record)} - of_the_command_line
    assert declared | {"source", "a", "b", "progress"} >= set(inspect.signature(function).parameters)  # type: ignore[arg-type]
    assert declared <= set(inspect.signature(function).parameters)  # type: ignore[arg-type]


@pytest.mark.parametrize("record", [ConvertOptions, LaunchOptions, OutputOptions])
def test_every_field_is_an_option_with_one_line_of_help(record: type[OptionRecord]) -> None:
    assert [each.name for each in options_of(record)] == [field.name for field in dataclasses.fields(record)]
    for each in options_of(record):
        assert each.help_text.endswith(".") and "\n" not in each.help_text


def test_the_flavors_and_dtypes_that_are_offered_are_those_that_are_taken() -> None:
    assert sorted(FLAVORS) == sorted(WRITABLE)
    floating = {name for name, dtype in dtypes.DTYPES.items() if dtype.floating and dtype.numpy}
    assert set(CASTABLE_DTYPES) == floating - {"float8_e8m0fnu"}


def test_none_is_the_default() -> None:
    assert ConvertOptions.of(dry_run=True, rename=None, world_size=None, verify=None) == ConvertOptions(dry_run=True)


def test_a_record_holds_the_types_of_its_fields_whatever_it_is_made_from() -> None:
    texts = {"to": "full", "verify": "full", "link": "hardlink", "max_memory": "1MiB", "include": "a.*"}
    options = ConvertOptions.of(**texts, units=Path("units.json"), dtype=torch.bfloat16, rename={"a": "b"})
    assert (options.to, options.verify, options.link) == (Layout.FULL, VerifyLevel.FULL, LinkMode.HARDLINK)
    assert isinstance(options.verify, VerifyLevel)
    assert (options.max_memory, options.include, options.units) == (1 << 20, ("a.*",), "units.json")
    assert (options.dtype, options.rename) == ("bfloat16", (("a", "b"),))
    assert isinstance(dataclasses.replace(options, to="sharded").to, Layout)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"to": "fulll"}, "--to cannot be 'fulll'"),
        ({"overwrite": "no"}, "overwrite takes True or False"),
        ({"dry_run": "false"}, "dry_run takes True or False"),
        ({"use_orig_params": 1}, "use_orig_params takes True or False"),
        ({"flavor": 5}, "--flavor takes text"),
        ({"include": 5}, "--include takes text"),
        ({"exclude": ["a", None]}, "--exclude takes text"),
        ({"units": 5}, "--units takes text"),
        ({"rename": [("a", "b", "c")]}, "--rename takes OLD=NEW"),
        ({"rename": 5}, "--rename takes OLD=NEW"),
        ({"rename": "a"}, "--rename takes OLD=NEW"),
        ({"map_value": "heads"}, "--map-value takes NAME=N"),
        ({"max_shard_size": 1.5}, "--max-shard-size takes a whole number"),
        ({"max_shard_size": 0}, "--max-shard-size is too small"),
        ({"world_size": 0}, "--world-size is too small"),
        ({"dtype": "int8"}, "--dtype int8 is not a floating-point dtype"),
        ({"param_dtype": "int8"}, "--param-dtype int8 is not a floating-point dtype"),
        ({"mesh_device": "gpu"}, "--mesh-device gpu is not a device type of PyTorch"),
        ({"mesh_device": ""}, "--mesh-device is empty"),
        ({"dtype": ""}, "--dtype is empty"),
        ({"to": ""}, "--to is empty"),
        ({"world_size": ""}, "--world-size is empty"),
        ({"max_memory": ""}, "--max-memory is empty"),
        ({"rename": ""}, "--rename is empty"),
        ({"torch_version": "9" * 5000 + ".1"}, "--torch-version takes a version"),
    ],
)
def test_a_record_refuses_what_its_options_do_not_take(values: dict[str, object], what: str) -> None:
    with pytest.raises(UsageError) as error:
        ConvertOptions.of(**values)
    assert error.value.what == what
    with pytest.raises(UsageError):
        fsdpckpt.convert("nothing-here", "target", **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "next_step"),
    [
        ({"dtype": "bf16"}, "--dtype bfloat16"),
        ({"optim_dtype": "float23"}, "--optim-dtype float32"),
        ({"param_dtype": "whole"}, "--param-dtype bfloat16"),
        ({"mesh_device": "cudaa"}, "--mesh-device cuda"),
        ({"to": "dcp"}, "--container dcp"),
        ({"dtype": "full"}, "--to full"),
        ({"dtype": "none"}, "--dtype bfloat16"),
        ({"to": "shardd"}, "did you mean --to sharded?"),
    ],
)
def test_the_error_names_the_value_that_was_probably_meant(values: dict[str, object], next_step: str) -> None:
    with pytest.raises(UsageError) as error:
        ConvertOptions.of(**values)
    assert error.value.next_step == next_step


SIZES = {"1000": 1000, "128MiB": 128 << 20, "128mib": 128 << 20, "5GB": 5 * 10**9, "5 g": 5 * 10**9, "1.5KiB": 1536}
SIZES |= {"2T": 2 * 10**12, "7B": 7}


@pytest.mark.parametrize("text", SIZES)
def test_a_size_has_decimal_or_binary_units(text: str) -> None:
    assert parse_size(text) == SIZES[text]


@pytest.mark.parametrize(
    "text", ["", "MiB", "12 parsecs", "1 2MB", "-5MB", "0x10", "nan", "inf", "infGB", "nanMiB", "1_000", "1e3", "3iB"]
)
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_size(text)
