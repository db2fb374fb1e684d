"""Files that a command writes about a checkpoint for people and other programs: a page, a list of test results.

Each is written complete or not at all, and never over anything but an earlier one of its kind.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from fsdpckpt.errors import TargetExistsError, TargetUnwritableError, UsageError
from fsdpckpt.flags import Flag, Message
from fsdpckpt.storage.local_target import replace_file
from fsdpckpt.storage.places import DirectoryTree
from fsdpckpt.storage.protocols import is_url


@dataclass(frozen=True, slots=True)
class Document:
    """A kind of file. ``option``: what names it. ``noun``: ``"report"``. ``mark``: how every one begins: a file that
    begins otherwise is never replaced. ``suffixes``: of its names, the usual one first. ``form``: ``"an HTML page"``.
    """

    option: Flag
    noun: str
    mark: str
    suffixes: tuple[str, ...]
    form: str

    def check(self, path: str, source: str) -> None:
        """Check that one may be written to ``path``.

        Raises UsageError for a path inside the checkpoint at ``source`` and for a name of something else,
        TargetExistsError if something else exists there, TargetUnwritableError if no file can be written there.
        """
        self._refuse_source(path, source)
        self._require_free(path)
        directory = os.path.dirname(path) or "."
        if not os.path.isdir(directory):
            raise self._unwritable(path, f"{directory} is not a directory")
        if not os.access(directory, os.W_OK | os.X_OK):
            raise self._unwritable(path, f"you have no permission to write in {directory}")

    def write(self, path: str, source: str, content: str) -> int:
        """Write ``content``, which begins with ``mark``, to ``path``; returns its length in bytes.

        Raises what ``check`` does.
        """
        self.check(path, source)
        data = Message(content).encode("utf-8", "backslashreplace")
        try:
            replace_file(path, data)
        except OSError as error:
            raise self._unwritable(path, error.strerror or str(error)) from None
        return len(data)

    @property
    def _example(self) -> str:
        return f"{self.option(self.noun + self.suffixes[0])}"

    def _unwritable(self, path: str, why: str) -> TargetUnwritableError:
        return TargetUnwritableError(
            f"the {self.noun} cannot be written to {path}: {why}",
            file=path,
            next_step=f"give {self.option} a file in a directory that exists and that you may write to",
        )

    def _refuse_source(self, path: str, source: str) -> None:
        """Raises UsageError for a path inside ``source``, a URL, and ``-``: stdout has the summary."""
        if path == "-":
            raise UsageError(f"{self.option} takes the name of a file", found=repr(path), next_step=self._example)
        if is_url(path):
            what = f"{self.option(path)}: a {self.noun} is written to a local file"
            raise UsageError(what, next_step=self._example)
        if not is_url(source) and os.path.isdir(source) and DirectoryTree(source).holds(path):
            raise UsageError(
                f"{self.option(path)} is inside the source, which is never written to",
                file=path,
                next_step=f"give {self.option} a file outside of SRC",
            )

    def _require_free(self, path: str) -> None:
        """Raises if ``path`` does not have the name of such a file, or exists and is no earlier one."""
        if os.path.isdir(path):
            inside = os.path.join(path, self.noun + self.suffixes[0])
            raise TargetExistsError(
                f"{path} is a directory; the {self.noun} is one file",
                file=path,
                next_step=f"{self.option(inside)}",
            )
        if os.path.exists(path) and not os.path.isfile(path):
            raise TargetUnwritableError(
                f"{path} is a pipe or a device; the {self.noun} is a file", file=path, next_step=self._example
            )
        if os.path.exists(path) and not self._is_earlier_one(path):
            raise TargetExistsError(
                f"{path} exists and is not a {self.noun} that {self.option} wrote",
                file=path,
                why=f"an earlier {self.noun} would be replaced; anything else is left alone",
                next_step=f"give {self.option} another name",
            )
        if not path.lower().endswith(self.suffixes):
            named = os.path.splitext(path)[0] + self.suffixes[0]
            raise UsageError(
                f"{self.option(path)}: a {self.noun} is {self.form}",
                expected=f"a name that ends in {self.suffixes[0]}",
                found=path,
                next_step=f"{self.option(named)}",
            )

    def _is_earlier_one(self, path: str) -> bool:
        try:
            with open(path, "rb") as file:
                return file.read(len(self.mark)) == self.mark.encode()
        except OSError:  # unreadable: not an earlier one of this user
            return False
