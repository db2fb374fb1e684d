"""The commands and their options, put together: what ``fsdpckpt.cli.main`` runs."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdpckpt.cli import convert, convert_help, diff, inspect, units, verify
from fsdpckpt.cli.output import Output
from fsdpckpt.version import __version__

__all__ = ["USAGE_ERRORS", "app"]

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
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)
app.command("inspect", short_help="What a checkpoint holds, and whether it is whole.", epilog=inspect.EXAMPLES)(
    inspect.inspect_command
)
app.command(
    "convert",
    cls=convert_help.ConvertCommand,
    short_help="To another layout, container or world size.",
    epilog=convert_help.EXAMPLES,
)(convert.convert_command)
app.command("diff", short_help="Compare two checkpoints key by key.", epilog=diff.EXAMPLES)(diff.diff_command)
app.command("verify", short_help="Prove one checkpoint whole.", epilog=verify.EXAMPLES)(verify.verify_command)
app.command("units", short_help="Make a units file: what flattened shards do not say.", epilog=units.EXAMPLES)(
    units.units_command
)

# typer's usage errors: it exports this one, and its base class catches the others in every version
USAGE_ERRORS: tuple[type[BaseException], ...] = (typer.BadParameter.__mro__[1],)


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
