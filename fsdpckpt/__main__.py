"""``python -m fsdpckpt``, and the ``fsdpckpt`` script."""

from fsdpckpt.cli import main

if __name__ == "__main__":
    main()
