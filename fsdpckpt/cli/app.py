"""Makes the commands: their parameters, help and completion come from the option records."""

from __future__ import annotations

import gc
import inspect as signatures
import textwrap
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Annotated, Any, ClassVar, Optional

import typer
from typer.core import TyperCommand, TyperGroup

from fsdpckpt.cli import convert, diff, formats, inspect, units, verify
from fsdpckpt.cli.errors import catch_signals, guarded
from fsdpckpt.cli.output import Streams
from fsdpckpt.errors import EMPTY, UsageError
from fsdpckpt.options import ConvertOptions, EachOptions, LaunchOptions
from fsdpckpt.options.commands import DiffOptions, InspectOptions, OutputOptions, UnitsOptions, VerifyOptions
from fsdpckpt.options.declare import Heading, Option, OptionRecord, options_of
from fsdpckpt.options.kinds import SIZE
from fsdpckpt.process import gc_frozen
from fsdpckpt.storage.protocols import require_complete_url
from fsdpckpt.version import __version__

EPILOG = """\b
Exit codes:
  0 done                            4 more information is needed
  1 differences or problems found   5 the target cannot be written
  2 wrong command line              6 a worker failed
  3 the source cannot be used       70 internal error, 130 interrupted

\b
Set FSDPCKPT_DEBUG=1 for tracebacks.
Each command has examples: fsdpckpt convert --help
"""
TUNABLE = (Heading.RESOURCES, Heading.WORKERS)
WIDEST_NAME = 30  # columns of the names of options in --help, before their descriptions

# typer's usage errors: it exports this one, and its base class catches the others in every version
USAGE_ERRORS: tuple[type[BaseException], ...] = (typer.BadParameter.__mro__[1],)


def _keep_texts(params: Iterable[Any]) -> None:
    """Make ``params`` take texts as they are given; option records convert them.

    typer would make a pydantic schema for each of them, also for one that is not given, and import pydantic for it: a
    sixth of the start of ``inspect``.
    """
    for param in params:
        if not isinstance(param.process_value, _TakesText):
            param.process_value = _TakesText(param, param.process_value)


class _TakesText:
    """``process_value`` of a parameter: only what is no text is left to the one that it replaces."""

    def __init__(self, param: Any, convert: Callable[[Any, Any], Any]) -> None:
        self._param, self._convert = param, convert

    def __call__(self, ctx: Any, value: Any) -> Any:
        param = self._param
        if value is None and not param.required:
            value = () if param.multiple else None
        elif not value or not all(isinstance(text, str) for text in (value if param.multiple else [value])):
            return self._convert(ctx, value)
        return value if param.callback is None else param.callback(ctx, param, value)


class _Program(TyperGroup):
    """All commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _keep_texts(self.get_params(ctx))
        return super().parse_args(ctx, args)


class HelpCommand(TyperCommand):
    """Shows ``--help`` with the options under headings, and breaks lines only between words.

    ``headings``: of each parameter. Parameters without one come under ``rest``, at the end. ``tunable``: those that do
    not change the output. They may be repeated, so that a script's limits can be overridden.
    """

    tunable: ClassVar[frozenset[str]] = frozenset()
    headings: ClassVar[dict[str, str]] = {}
    rest: ClassVar[str] = "Options"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises UsageError for an option with one value that is given twice; of ``tunable`` ones the last counts."""
        _keep_texts(self.get_params(ctx))
        if not ctx.resilient_parsing:
            _, words, order = self.make_parser(ctx).parse_args(args=list(args))
            options: list[Any] = [param for param in order if not _is_argument(param)]
            for option in options:
                single = not option.multiple and (not option.is_flag or option.secondary_opts)
                if single and option.name not in self.tunable and options.count(option) > 1:
                    flags = " or ".join((*option.opts, *option.secondary_opts))
                    raise UsageError(f"{flags} is given more than once", next_step="give it once")
            if words:
                raise UsageError(f"unexpected argument: {words[0]}")
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """``[OPTIONS] SRC DST``."""
        return ["[OPTIONS]", *(param.metavar or "" for param in self.get_params(ctx) if _is_argument(param))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of arguments and options."""
        order = ("Arguments", *dict.fromkeys(self.headings.values()), self.rest)
        rows: dict[str, list[tuple[str, str]]] = {heading: [] for heading in order}
        for param in self.get_params(ctx):
            if _is_argument(param):
                rows["Arguments"].append((param.metavar or "", getattr(param, "help", "") or ""))
            elif (record := param.get_help_record(ctx)) is not None:
                rows[self.headings.get(param.name or "", self.rest)].append(record)
        for heading, records in rows.items():
            if records:
                with formatter.section(heading):
                    formatter.write(_table(records, formatter.current_indent, formatter.width))


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _table(rows: list[tuple[str, str]], indent: int, width: int) -> str:
    """Names and their descriptions, side by side."""
    column = indent + min(max(len(name) for name, _ in rows), WIDEST_NAME) + 2
    lines = []
    for name, text in rows:
        beside = textwrap.wrap(text, width - column, break_on_hyphens=False, break_long_words=False)
        first = " " * indent + name
        if len(first) <= column - 2 and beside:
            first = first.ljust(column) + beside.pop(0)
        lines += [first, *(" " * column + line for line in beside)]
    return "".join(f"{line}\n" for line in lines)


def command(
    body: Callable[..., int], arguments: Iterable[tuple[str, str, str]], records: Iterable[type], needs: str
) -> Callable[..., int]:
    """A function that typer turns into a command.

    ``body`` gets a Streams, the value of each of ``arguments`` (name, metavar, help text), and one of each of
    ``records``, filled from the command line. ``needs``: a module that takes long to import, imported while a signal
    still ends the process at once.
    """
    arguments, records = list(arguments), list(records)

    def run(**values: Any) -> int:
        printing: OutputOptions = _fill_record(OutputOptions, values)
        output = Streams(as_json=printing.as_json, quiet=printing.quiet)
        import_module(needs)
        with gc_frozen():  # what was imported counts as old
            gc.enable()  # ``main`` paused it
        # What is read of a checkpoint lives until the command ends: it is walked ten times less often than usual.
        gc.set_threshold(*gc.get_threshold()[:2], 100)
        catch_signals()

        def work() -> int:
            paths = [_gather_values(metavar, values[name]) for name, metavar, _ in arguments]
            filled = [_fill_record(record, values) for record in records]
            code = body(output, *paths, *filled)
            return 1 if code == 0 and output.warned and printing.fail_on is not None else code

        return guarded(output, work)

    keyword_only = signatures.Parameter.KEYWORD_ONLY
    run.__signature__ = signatures.Signature(  # type: ignore[attr-defined]
        [
            *(
                signatures.Parameter(name, keyword_only, annotation=_argument(metavar, help_text))
                for name, metavar, help_text in arguments
            ),
            *(_parameter(option) for record in (*records, OutputOptions) for option in options_of(record)),
        ]
    )
    run.__doc__ = body.__doc__
    return run


def _gather_values(metavar: str, path: str) -> str:
    if not path:
        raise UsageError(f"{metavar} is empty", why=EMPTY, next_step=f"give {metavar}: a path or a URL")
    if path.startswith("file:/"):
        local = path.removeprefix("file:").removeprefix("//")
        what = f"{metavar} is a local file, which is given by its path: {path}"
        raise UsageError(what, next_step=f"give {local or 'its path'}")
    require_complete_url(path, metavar)
    return path


def _fill_record(record: type[OptionRecord], values: dict[str, Any]) -> Any:
    return record.of(**{each.name: values[each.name] for each in options_of(record)})


def _argument(metavar: str, help_text: str) -> Any:
    return Annotated[str, typer.Argument(metavar=metavar, help=help_text, show_default=False)]


def _parameter(option: Option) -> signatures.Parameter:
    """The parameter of a command that typer turns into ``option`` of its record."""
    cli_type: Any = option.kind.cli_type
    default: Any = option.default
    if not isinstance(default, bool | int | float) or option.kind == SIZE:
        default = None
    flags = [str(option.flag), *([option.short] if option.short else [])]
    if option.choices and option.default is not None:
        default = str(option.default)
    elif cli_type is bool and option.default is None:
        flags = [f"{flags[0]}/--no-{flags[0].removeprefix('--')}"]
    elif cli_type is str and default is not None:
        default = str(default)
    completed = option.choices or option.completion
    complete: Callable[..., list[str]] | None = _complete_key if option.name in _KEYS else None
    if completed:
        complete = _completer(completed)
    declared = typer.Option(
        *flags,
        help=option.help_text,
        metavar=option.metavar,
        show_default=default is not None,
        autocompletion=complete,
    )
    annotation: Any = Annotated[cli_type if default is not None else Optional[cli_type], declared]  # noqa: UP045
    return signatures.Parameter(option.name, signatures.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_KEYS = frozenset({"keys", "include", "exclude"})  # options whose values are keys of SRC, or globs


def _complete_key(ctx: typer.Context, incomplete: str) -> list[str]:
    """The keys of SRC that begin with ``incomplete``, up to the next dot: ``model.layers.`` for ``model.la``."""
    # With the value still to come, the parser stops before it gives the arguments their names.
    source = ctx.params.get("source") or next(iter(ctx.args), None)
    if not isinstance(source, str) or "://" in source:  # a shell does not wait for a store
        return []
    from contextlib import redirect_stderr
    from io import StringIO

    from fsdpckpt import api
    from fsdpckpt.errors import FsdpckptError

    try:
        with redirect_stderr(StringIO()):
            keys = [named.key for named in api.inspect(source).tensors]
    except (FsdpckptError, OSError):
        return []
    begun = len(incomplete)
    matching = (key for key in keys if key.startswith(incomplete))
    ends = ((key, key.find(".", begun)) for key in matching)
    return list(dict.fromkeys(key if end < 0 else key[: end + 1] for key, end in ends))


def _completer(words: tuple[str, ...]) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


class _ConvertHelp(HelpCommand):
    headings: ClassVar = {
        option.name: heading.value
        for heading in Heading
        for record in (ConvertOptions, LaunchOptions, EachOptions)
        for option in options_of(record)
        if option.heading is heading
    }
    rest: ClassVar = Heading.OTHER.value
    tunable: ClassVar = frozenset(
        option.name
        for record in (ConvertOptions, LaunchOptions, EachOptions)
        for option in options_of(record)
        if option.heading in TUNABLE
    )


# Rich help and rich tracebacks cost a tenth of a second to import, which is most of what --help may take.
app = typer.Typer(
    name="fsdpckpt",
    cls=_Program,
    help="Convert, inspect, compare and verify PyTorch FSDP checkpoints: parameters and optimizer state.",
    epilog=EPILOG,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)
_SRC = ("source", "SRC", "A file, a directory or a URL; its format is detected.")
_DST = ("target", "DST", "A path or an object store's URL; .pt and .safetensors name one file.")
_A = ("a", "A", "A file, a directory or a URL.")
_B = ("b", "B", "What to compare it with.")

app.command(
    "inspect",
    cls=HelpCommand,
    short_help="Show what a checkpoint holds, and if it is complete.",
    epilog=inspect.EXAMPLES,
)(command(inspect.inspect_command, [_SRC], [InspectOptions], "fsdpckpt.queries.inspect"))
app.command(
    "convert",
    cls=_ConvertHelp,
    short_help="Convert to another layout, container or world size.",
    epilog=convert.EXAMPLES,
)(
    command(
        convert.convert_command,
        [_SRC, _DST],
        [ConvertOptions, LaunchOptions, EachOptions],
        "fsdpckpt.converters.pipeline",
    )
)
app.command("diff", cls=HelpCommand, short_help="Compare two checkpoints key by key.", epilog=diff.EXAMPLES)(
    command(diff.diff_command, [_A, _B], [DiffOptions], "fsdpckpt.queries.diff")
)
app.command("verify", cls=HelpCommand, short_help="Check a checkpoint for damage.", epilog=verify.EXAMPLES)(
    command(verify.verify_command, [_SRC], [VerifyOptions], "fsdpckpt.queries.verify")
)
app.command(
    "units", cls=HelpCommand, short_help="Make a units file for FSDP1's flattened shards.", epilog=units.EXAMPLES
)(command(units.units_command, [], [UnitsOptions], "fsdpckpt.api"))
app.command("formats", cls=HelpCommand, short_help="List what can be read and written.", epilog=formats.EXAMPLES)(
    command(formats.formats_command, [], [], "fsdpckpt.producers.recognition")
)


@app.command("version", short_help="Show the version.")
def _show_version() -> None:
    """Show the version, as --version does."""
    Streams(as_json=False, quiet=False).data([f"fsdpckpt {__version__}"])


@app.command("help", short_help="Show the help of a command.")
def _show_help(
    ctx: typer.Context,
    words: Annotated[Optional[list[str]], typer.Argument(metavar="[COMMAND]", show_default=False)] = None,  # noqa: UP045
) -> None:
    """Show the help of COMMAND, as COMMAND --help does."""
    program = ctx.parent
    group = program.command if program is not None else ctx.command
    name, *more = words or [""]
    if more:
        raise UsageError(
            f"help takes one command, not {' '.join(words or ())}",
            next_step=f"fsdpckpt help {more[0]}, or fsdpckpt help {name}",
        )
    command_named = group.get_command(program, name) if name else group  # type: ignore[attr-defined]
    if command_named is None:
        listed = ", ".join(group.list_commands(program))  # type: ignore[attr-defined]
        raise UsageError(f"no such command: {name}", expected=listed, next_step="fsdpckpt --help")
    names = ["--help", "-h"]
    context = command_named.context_class(
        command_named, info_name=name or "fsdpckpt", parent=program if name else None, help_option_names=names
    )
    Streams(as_json=False, quiet=False).data(command_named.get_help(context).split("\n"))


def _version(wanted: bool) -> None:  # noqa: FBT001  # typer calls it so
    if wanted:
        Streams(as_json=False, quiet=False).data([f"fsdpckpt {__version__}"])
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _program(
    ctx: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version
    if ctx.invoked_subcommand is None:
        Streams(as_json=False, quiet=False).error(ctx.get_help().split("\n"))
        raise typer.Exit(2)
