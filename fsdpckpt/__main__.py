"""``python -m fsdpckpt`` is the ``fsdpckpt`` command."""

from fsdpckpt.cli.main import main

if __name__ == "__main__":
    main()
