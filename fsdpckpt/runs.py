"""Converts each checkpoint of a run: ``fsdpckpt convert RUN OUT --each 'step-*'``.

Running it again is cheap to type and safe: what is complete in OUT is compared and kept, what was interrupted goes on,
and a checkpoint that cannot be converted does not stop the others.
"""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fsdpckpt import flags
from fsdpckpt.converters import Report
from fsdpckpt.errors import FsdpckptError, InterruptedRunError, SourceError, SourceMissingError, UsageError, WorkerError
from fsdpckpt.globs import matches
from fsdpckpt.options import ConvertOptions, EachOptions, LaunchOptions
from fsdpckpt.progress import Progress
from fsdpckpt.readers.candidates import is_pointer_file
from fsdpckpt.storage import is_url
from fsdpckpt.storage.sources import Sources
from fsdpckpt.storage.target_checks import require_outside
from fsdpckpt.text import natural, some_of
from fsdpckpt.worker import convert

_SHOWN = 8  # names in a message
_ALIKE = 3  # checkpoints that are refused in the same words before it is said once


@dataclass(frozen=True, slots=True)
class Attempt:
    """The conversion of one checkpoint, ``name`` below the run, to ``target``: its ``report``, or its ``error``."""

    name: str
    target: str
    report: Report | None = None
    error: FsdpckptError | None = None

    @property
    def exit_code(self) -> int:
        return self.error.exit_code if self.error is not None else 0

    @property
    def was_there(self) -> bool:
        """Whether the target was already complete: every byte was compared, and none was written."""
        return self.report is not None and self.report.was_complete

    def to_json(self) -> dict[str, object]:
        """``report``: as of one conversion; ``error``: as ``--json`` shows it, None without one."""
        error = self.error.describe() if self.error is not None else None
        report = self.report.to_json() if self.report is not None else None
        return {"name": self.name, "target": self.target, "report": report, "error": error}


def convert_each(
    run: str, out: str, each: EachOptions, options: ConvertOptions, launch: LaunchOptions, progress: Progress
) -> Iterator[Attempt]:
    """Convert the checkpoints of ``run`` that ``each`` selects, in the natural order of their names, to directories or
    files of the same names in ``out``. With ``watch`` it does not end: it looks for new ones again and again, and an
    error that stays the same is no second attempt.

    Raises SourceMissingError if none matches (not with ``watch``), UsageError for an option with which none, or none of
    the first three, can be converted, WorkerError, InterruptedRunError. Other errors are in the attempts.
    """
    glob = _require_glob(each)
    _require_out_apart(out, run)
    accepting = _accepting_what_is_there(options)
    done: set[str] = set()
    outcome = _Outcome()
    while True:
        names = [name for name in find_checkpoints(run, glob, each.newer_than) if name not in done]
        if not names and each.watch is None:
            raise _no_match_error(run, glob, each.newer_than)
        for name in names:
            attempt = _attempt(run, out, name, accepting, launch, progress)
            if not _may_become_whole(attempt):
                done.add(name)
            yield from outcome.to_report(attempt)
        outcome.require_one_that_fits()
        if each.watch is None:
            return
        time.sleep(each.watch)


def _accepting_what_is_there(options: ConvertOptions) -> ConvertOptions:
    """``options`` with which a target that is there and complete is compared and kept, unless they say otherwise."""
    unsaid = options.resume is None and not options.overwrite
    return replace(options, resume=True) if unsaid else options


def _may_become_whole(attempt: Attempt) -> bool:
    """Whether another attempt may succeed: a checkpoint that is incomplete may be of a save that is under way."""
    error = attempt.error
    return error is not None and (isinstance(error, SourceError) or error.retryable)


class _Outcome:
    """Decides which attempts to report, and when the command itself is wrong.

    The first checkpoints that are refused for an option are held back: if it is wrong for all of them, that is one
    error of the command and not one for each checkpoint. With ``--watch``, an error that stays the same is reported
    once.
    """

    def __init__(self) -> None:
        self._held: list[Attempt] = []  # the first ones that were refused, as long as none has shown that options fit
        self._options_fit = False
        self._last_error: dict[str, str] = {}  # of each checkpoint that was tried, in words

    def to_report(self, attempt: Attempt) -> Iterator[Attempt]:
        """``attempt`` and those that were held back, as far as they are to be reported now.

        Raises UsageError if the first checkpoints are all refused in the same words.
        """
        error = attempt.error
        if isinstance(error, UsageError) and not self._options_fit:
            self._held.append(attempt)
            self._require_different_refusals()
            return
        # Of a source that cannot be read the options may be right or wrong.
        if not isinstance(error, SourceError):
            self._options_fit = True
        if self._options_fit:
            yield from self._held
            self._held.clear()
        if error is None or self._last_error.get(attempt.name) != str(error):
            yield attempt
        self._last_error[attempt.name] = str(error)

    def require_one_that_fits(self) -> None:
        """Raises the first error that was held back, if nothing has shown yet that the options fit any checkpoint."""
        if self._held and self._held[0].error is not None:
            raise self._held[0].error

    def _require_different_refusals(self) -> None:
        first, errors = self._held[0].error, {str(attempt.error) for attempt in self._held}
        if first is not None and len(self._held) == _ALIKE and len(errors) == 1:
            raise first


def _require_out_apart(out: str, run: str) -> None:
    """Raises UsageError if ``out`` is ``run`` or lies in it: the next run would take it for a checkpoint."""
    if not is_url(run) and not is_url(out):
        require_outside(out, run)
    elif is_url(run) and is_url(out):
        from fsdpckpt.storage.remote_dst import require_apart_in_store
        from fsdpckpt.storage.remote_store import filesystem_of

        filesystem, root = filesystem_of(out)
        require_apart_in_store(out, run, filesystem, root, above=False)


def find_checkpoints(run: str, glob: str, newer_than: str | None) -> list[str]:
    """The names below ``run`` that match ``glob``, component by component, in natural order; only those after
    ``newer_than``. Hidden names match no glob, a link to what is found anyway is no second checkpoint, and a ``latest``
    file that names a step is none.
    """
    found = {"": ""}  # where each leads, if there is a link on the way
    with Sources() as sources:
        for part in glob.strip("/").split("/"):
            found = {name: link for above in found.items() for name, link in _matching(run, above, part, sources)}
    names = sorted(_without_second_names(run, found), key=natural)
    if newer_than is None:
        return names
    last = natural(newer_than.strip("/"))
    return [name for name in names if natural(name) > last]


def _without_second_names(run: str, found: Mapping[str, str]) -> list[str]:
    """The names of ``found`` without links to others of them. ``found``: where each leads, "" if it is no link.

    Of several links to one place elsewhere, the one that is called as that place is stays.
    """
    own = {os.path.realpath(f"{run}/{name}") for name, link in found.items() if not link}
    first: dict[str, str] = {}
    for name, link in sorted(
        found.items(), key=lambda each: posixpath.basename(each[0]) != posixpath.basename(each[1])
    ):
        first.setdefault(link, name)
    return [name for name, link in found.items() if not link or (link not in own and first[link] == name)]


def _matching(run: str, above: tuple[str, str], glob: str, sources: Sources) -> Iterator[tuple[str, str]]:
    """What matches ``glob`` in the directory ``above`` of ``run``, with where it leads; nothing if that is a file."""
    name, link = above
    directory = "/".join([run.rstrip("/"), name]).rstrip("/")
    entry = sources.stat(directory)
    if entry is None or not entry.directory:
        return
    for child in sources.list_directory(directory):
        if not child.name.startswith(".") and matches(child.name, glob) and not is_pointer_file(child):
            leads_to = child.link or (f"{link}/{child.name}" if link else "")
            yield (f"{name}/{child.name}" if name else child.name), leads_to


def _attempt(
    run: str, out: str, name: str, options: ConvertOptions, launch: LaunchOptions, progress: Progress
) -> Attempt:
    source, target = f"{run.rstrip('/')}/{name}", f"{out.rstrip('/')}/{name}"
    try:
        return Attempt(name, target, convert(source, target, options, launch, progress))
    except (InterruptedRunError, WorkerError):
        raise
    except FsdpckptError as error:
        return Attempt(name, target, error=error)
    except OSError as error:  # a link to itself, a directory that may not be read
        what = f"{source}: {error.strerror or error}"
        return Attempt(name, target, error=SourceError(what, file=source, next_step="see what it is, or leave it out"))


def _require_glob(each: EachOptions) -> str:
    """The glob of ``--each``. Raises UsageError without one."""
    if each.each is None:
        given = flags.newer_than if each.newer_than is not None else flags.watch
        raise UsageError(
            f"{given} selects checkpoints of a run, and there is no {flags.each}",
            next_step=f"add {flags.each('GLOB')}, for example {flags.each('step-*')}",
        )
    if not each.each.strip("/") or ".." in each.each.split("/"):
        raise UsageError(
            f"{flags.each} names checkpoints below SRC",
            found=each.each,
            next_step=f"give a glob of their names, for example {flags.each('step-*')} or "
            f"{flags.each('global_step_*/actor')}",
        )
    if each.newer_than is not None and not _has_form(each.newer_than, each.each):
        raise UsageError(
            f"{flags.newer_than(each.newer_than)} is not such a name as {flags.each(each.each)} selects",
            next_step="give the name of one of these checkpoints; it may be gone by now",
        )
    return each.each


def _has_form(name: str, glob: str) -> bool:
    """Whether ``name`` matches ``glob``, component by component."""
    names, globs = name.strip("/").split("/"), glob.strip("/").split("/")
    return len(names) == len(globs) and all(map(matches, names, globs))


def _no_match_error(run: str, glob: str, newer_than: str | None) -> SourceMissingError:
    with Sources() as sources:
        entry = sources.stat(run)
        if entry is None or not entry.directory:
            lacks = "does not exist" if entry is None else "is a file"
            return SourceMissingError(
                f"{run} {lacks}, and {flags.each} takes the directory of a run",
                file=run,
                next_step=None if entry is None else f"give that directory, or drop {flags.each} to convert this file",
            )
        names = sorted((child.name for child in sources.list_directory(run)), key=natural)
    after = f" after {newer_than}" if newer_than is not None else ""
    return SourceMissingError(
        f"nothing in {run} matches {flags.each(glob)}{after}",
        file=run,
        found=some_of(names, _SHOWN) or "an empty directory",
        next_step="give a glob of the names of its checkpoints",
    )
