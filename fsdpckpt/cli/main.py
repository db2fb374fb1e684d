"""The command line: options in, one call of the API, an exit code out."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fsdpckpt.cli import convert, diff, inspect, verify
from fsdpckpt.cli.boundary import catch_termination, guarded, report
from fsdpckpt.cli.output import Output
from fsdpckpt.errors import InterruptedRunError, UsageError
from fsdpckpt.version import __version__

__all__ = ["app", "main"]

EPILOG = """\b
Exit codes: 0 done; 1 differences or problems found; 2 wrong command line; 3 the source cannot be used;
4 more information is needed; 5 the target cannot be written; 6 a worker failed; 70 internal error; 130 interrupted.

\b
Set FSDPCKPT_DEBUG=1 for tracebacks. Each command has examples: fsdpckpt convert --help
"""

# Rich help and rich tracebacks cost a tenth of a second to import, which is most of what --help may take.
app = typer.Typer(
    name="fsdpckpt",
    help="Convert, inspect, compare and verify PyTorch FSDP checkpoints: parameters and optimizer state.",
    epilog=EPILOG,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)
app.command("inspect", short_help="What a checkpoint holds, and whether it is whole.", epilog=inspect.EXAMPLES)(
    inspect.inspect_command
)
app.command("convert", short_help="To another layout, container or world size.", epilog=convert.EXAMPLES)(
    convert.convert_command
)
app.command("diff", short_help="Compare two checkpoints key by key.", epilog=diff.EXAMPLES)(diff.diff_command)
app.command("verify", short_help="Prove one checkpoint whole.", epilog=verify.EXAMPLES)(verify.verify_command)

# typer's usage errors: it exports this one, and its base class catches the others in every version
_USAGE_ERRORS: tuple[type[BaseException], ...] = (typer.BadParameter.__mro__[1],)


def _version(wanted: bool) -> None:  # noqa: FBT001  # typer calls it so
    if wanted:
        Output(as_json=False, quiet=False).data([f"fsdpckpt {__version__}"])
        raise typer.Exit


@app.callback()
def _program(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit with the contract's code."""
    catch_termination()
    output = Output(as_json="--json" in sys.argv[1:], quiet=False)
    sys.exit(guarded(output, lambda: _run(output)))


def _run(output: Output) -> int:
    try:
        code = app(standalone_mode=False)
    except typer.Abort:
        return report(output, InterruptedRunError("interrupted"))
    except _USAGE_ERRORS as error:
        text = str(error)
        if text.startswith("Usage:") and not output.as_json:  # no command at all: typer's answer is the help
            output.error(text)
            return UsageError.exit_code
        return report(output, _usage(error))
    return code if isinstance(code, int) else 0


def _usage(error: BaseException) -> BaseException:
    """A typer usage error in the form of this program's."""
    context = getattr(error, "ctx", None)
    message = getattr(error, "format_message", lambda: str(error))()
    path = getattr(context, "command_path", "fsdpckpt")
    what = str(message).replace("Value error, ", "")
    return UsageError(what, next_step=f"{path} --help shows the options, with examples")
