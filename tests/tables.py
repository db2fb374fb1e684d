"""What the tables of scenarios share: how a row says that a command refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from fsdpckpt.errors import FsdpckptError

__all__ = ["Refused"]


@dataclass(frozen=True)
class Refused:
    """An error: its exit code, ``words`` of what it says and advises, and all its ``details``, if the row says them.

    ``silent``: words that it does not say.
    """

    code: int
    words: str | Sequence[str] = ()
    details: Sequence[str] | None = None
    silent: Sequence[str] = ()

    def by(self, command: Callable[[], object]) -> FsdpckptError:
        """Run ``command``, which is refused so."""
        with pytest.raises(FsdpckptError) as caught:
            command()
        error = caught.value
        text = " ".join(map(str, (error.what, *error.details, error.why, error.next_step)))
        assert error.exit_code == self.code, text
        for word in [self.words] if isinstance(self.words, str) else self.words:
            assert word in text
        assert self.details is None or tuple(error.details) == tuple(self.details)
        assert not [word for word in self.silent if word in text]
        return error
