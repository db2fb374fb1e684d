"""Chooses where a conversion runs: in this process, or on workers that torchrun, srun or this program started.

``python -m fsdpckpt.worker REQUEST`` is one worker of a launch by this program: the request is a JSON file, and the
report is beside it when all have ended. Workers that a user's torchrun or srun started call ``convert`` like any other
program, and find each other through the environment. Imports torch only if there are workers.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from fsdpckpt import flags
from fsdpckpt.converters import Report
from fsdpckpt.converters.target.layout import refuse_unknown_suffix
from fsdpckpt.credentials import without_credentials
from fsdpckpt.errors import FsdpckptError, InterruptedRunError, UsageError, WorkerError, require_torch
from fsdpckpt.options import ConvertOptions, Launcher, LaunchOptions
from fsdpckpt.options.declare import Scope, refuse_unused
from fsdpckpt.process import process_role, rank_from_environment, started_as_worker
from fsdpckpt.progress import Progress, ProgressPipe, follow_progress
from fsdpckpt.storage.hidden import lock_path

if TYPE_CHECKING:
    from fsdpckpt.comm.protocol import Group

REQUEST, REPORT, PROGRESS = "request.json", "report.json", "progress"


def convert(source: str, target: str, options: ConvertOptions, launch: LaunchOptions, progress: Progress) -> Report:
    """Convert ``source`` to ``target`` on the processes of ``launch``. The output is the same on any of them.

    Raises what ``converters.pipeline.convert`` raises, and WorkerError if a worker or the process group failed. The
    error says what is left for the next run.
    """
    refuse_unknown_suffix(target)
    try:
        return _convert(source, target, options, launch, progress)
    except BaseException as error:
        from fsdpckpt.converters.output import attach_leftovers

        attach_leftovers(error, target, options)
        raise


def _convert(source: str, target: str, options: ConvertOptions, launch: LaunchOptions, progress: Progress) -> Report:
    if launch.launcher is not Launcher.LOCAL and started_as_worker():
        refuse_unused(launch, Scope.LAUNCH, "torchrun or srun started this process as one of its workers already")
        return _as_worker(source, target, options, launch, progress)
    if launch.launcher is Launcher.TORCHRUN or launch.nproc_per_node is not None or launch.nnodes != 1:
        if launch.launcher is Launcher.LOCAL:
            refuse_unused(launch, Scope.LAUNCH, f"{flags.launcher('local')} is one process")
        if launch.nproc_per_node is None and launch.nnodes == 1:
            what = f"{flags.launcher('torchrun')} starts workers, and their number is missing"
            raise UsageError(what, next_step=f"add {flags.nproc_per_node('N')}")
        return _launched(source, target, options, launch, progress)
    refuse_unused(launch, Scope.WORKERS, "there are no workers", f"add {flags.nproc_per_node('N')}")
    from fsdpckpt.comm.protocol import Solo
    from fsdpckpt.converters.pipeline import convert as run

    return run(Solo(), source, target, options, progress)


def _as_worker(source: str, target: str, options: ConvertOptions, launch: LaunchOptions, progress: Progress) -> Report:
    """This process's part of a run of several. Sets the rank that prints in ``process_role``."""
    require_torch("workers need")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported: we report lost workers ourselves
    from fsdpckpt.comm.protocol import original_error
    from fsdpckpt.comm.torch_group import TorchGroup

    process_role.worker = True
    try:
        with (
            _defer_sigterm(launch.fault_limit) as groups,
            TorchGroup.start(backend=launch.backend, device=launch.device, limit=launch.fault_limit) as group,
        ):
            groups.append(group)
            return _run_rank(group, source, target, options, launch, progress)
    except WorkerError as error:
        process_role.lost = True
        if error.rank == 0 and error.cause_exit_code == WorkerError.exit_code:
            process_role.speaker = 1  # rank 0 did not say so itself: it cannot
        original = original_error(error)
        _report_to_torchrun(original)
        raise original from error


def _run_rank(
    group: Group, source: str, target: str, options: ConvertOptions, launch: LaunchOptions, progress: Progress
) -> Report:
    """Take part in the conversion as one rank of ``group``, which torchrun or srun described in the environment."""
    from fsdpckpt.converters.pipeline import convert as run

    rank_info = rank_from_environment()
    workers_here = rank_info.local_world_size if rank_info is not None else 1
    scope = launch.output_visibility
    return run(group, source, target, options, progress, scope=scope, workers_here=workers_here)


def _report_to_torchrun(error: Exception) -> None:
    """Store ``error`` where torchrun looks for it, so that its own summary ends with the cause.

    The form is that of ``torch.distributed.elastic.multiprocessing.errors.ErrorHandler``.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    what = error.what if isinstance(error, FsdpckptError) else without_credentials(f"{type(error).__name__}: {error}")
    extra = {"py_callstack": what, "timestamp": str(int(time.time()))}  # the former is what is shown
    with suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": what, "extraInfo": extra}}, file)


@contextmanager
def _defer_sigterm(limit: float) -> Iterator[list[Group]]:
    """On SIGTERM, first find out whether another worker was lost.

    A launcher that sees one worker end stops the others at once, before any of them noticed, and nobody would report
    which one it was.

    The body puts the group into the list. Once a loss is known, SIGTERM has no effect any more.
    """
    before = signal.getsignal(signal.SIGTERM)
    groups: list[Group] = []
    loss_known = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal loss_known
        deadline = time.monotonic() + limit
        while not loss_known and groups and time.monotonic() < deadline:
            try:
                groups[0].watch(moving=True)
            except WorkerError:
                loss_known = True
                raise
            time.sleep(0.05)
        if loss_known:
            return
        if callable(before):
            before(number, frame)
        raise InterruptedRunError("interrupted by SIGTERM", run_again=True, retryable=True)

    if threading.current_thread() is not threading.main_thread():
        yield groups
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield groups
    finally:
        signal.signal(signal.SIGTERM, before)


def _launched(source: str, target: str, options: ConvertOptions, launch: LaunchOptions, progress: Progress) -> Report:
    """Start workers on this node, wait for them, and return rank 0's report."""
    require_torch("workers need")
    from fsdpckpt.comm.launch import launch as start
    from fsdpckpt.comm.launch import local_workers
    from fsdpckpt.comm.protocol import decode_error, original_error

    workers = local_workers(launch.nproc_per_node or "auto")
    with _request_directory() as directory:
        request = os.path.join(directory, REQUEST)
        with open(request, "w", encoding="utf-8") as file:
            json.dump({"source": source, "target": target, "options": asdict(options), "launch": asdict(launch)}, file)
        try:
            with follow_progress(os.path.join(directory, PROGRESS), progress):
                start(
                    [request],
                    workers=workers,
                    module="fsdpckpt.worker",
                    nodes=launch.nnodes,
                    node_rank=launch.node_rank,
                    endpoint=launch.rdzv_endpoint,
                )
        except WorkerError as error:
            if record := _read(directory).get("error"):
                raise decode_error(record) from error
            raise original_error(error) from error
        result = _read(directory)
    process_role.worker, process_role.speaker = True, 0 if result["speaks"] else -1  # of several nodes one says it
    return Report.from_json(result["report"])


_PREFIX = "fsdpckpt-request-"
_SECONDS_TO_LOCK = 60  # after it was made, a request's directory is locked, or whoever made it is gone


@contextmanager
def _request_directory() -> Iterator[str]:
    """A directory for the request to the workers, locked; those of launchers that were killed are removed: a request
    has the URLs as they were given, with what opens them.
    """
    for entry in os.scandir(tempfile.gettempdir()):
        if entry.name.startswith(_PREFIX):
            with suppress(OSError):  # another user's, or another launcher removes it
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and time.time() - status.st_mtime > _SECONDS_TO_LOCK:
                    lock_path(entry.path, os.O_RDONLY | os.O_DIRECTORY).close()
                    shutil.rmtree(entry.path)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as directory:
        lock = lock_path(directory, os.O_RDONLY | os.O_DIRECTORY, wait=True)
        try:
            yield directory
        finally:
            lock.close()


def _read(directory: str) -> dict[str, Any]:
    try:
        with open(os.path.join(directory, REPORT), encoding="utf-8") as file:
            document: dict[str, Any] = json.load(file)
    except (FileNotFoundError, ValueError):  # the worker was killed before, or while, it wrote this
        return {}
    return document


def _write(directory: str, document: dict[str, Any]) -> None:
    """Report to the process that launched the workers of this node. Only the node's first worker does."""
    if os.environ["LOCAL_RANK"] == "0":
        with open(os.path.join(directory, REPORT), "w", encoding="utf-8") as file:
            json.dump(document, file)


def main() -> None:
    """Run one worker of ``_launched``. The launcher reports everything; this process only works and ends."""
    from fsdpckpt.comm.protocol import encode_error
    from fsdpckpt.comm.torch_group import TorchGroup

    (request,) = sys.argv[1:]
    with open(request, encoding="utf-8") as file:
        document = json.load(file)
    directory = os.path.dirname(request)
    launch = LaunchOptions(**document["launch"])
    if os.environ.get("FSDPCKPT_DEBUG") != "1":
        sys.excepthook = lambda *_: None  # the launcher says what went wrong
    try:
        with (
            TorchGroup.start(backend=launch.backend, device=launch.device, limit=launch.fault_limit) as group,
            ProgressPipe(os.path.join(directory, PROGRESS)) as progress,
        ):
            options = ConvertOptions(**document["options"])
            report = _run_rank(group, document["source"], document["target"], options, launch, progress)
            _write(directory, {"report": report.to_json(), "speaks": group.rank == 0})
    except WorkerError as error:
        _end(error.exit_code)
    except FsdpckptError as error:  # before there was a group: every worker says the same
        _write(directory, {"error": encode_error(error)})
        _end(error.exit_code)
    _end(0)


def _end(code: int) -> NoReturn:
    """End at once: torch's threads can abort an orderly end, and the destructors of a failed process group hang.

    Everything that this worker has written is closed, and the launcher looks only at the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
