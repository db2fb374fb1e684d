"""``python -m fsdpckpt`` and the ``fsdpckpt`` script."""

from fsdpckpt.cli import end_on_signals


def main() -> None:
    """Run the command line. A Ctrl-C while it still loads ends it without a traceback."""
    end_on_signals()
    from fsdpckpt.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
