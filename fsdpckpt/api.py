"""The Python API: ``inspect``, ``convert``, ``diff``, ``verify`` and ``open``. The commands are thin over these."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from fsdpckpt.converters.options import ConvertOptions, TensorForm, VerifyLevel, parse_size
from fsdpckpt.errors import UsageError
from fsdpckpt.ir.checkpoint import Checkpoint, Container, Layout, NamedTensor, Section
from fsdpckpt.progress import Progress
from fsdpckpt.storage.sources import Sources, is_url

if TYPE_CHECKING:
    from fsdpckpt.converters.report import Report
    from fsdpckpt.describe import Description, Json
    from fsdpckpt.lazy import LazyCheckpoint
    from fsdpckpt.verify.compare import Difference
    from fsdpckpt.verify.integrity import Verification

__all__ = ["convert", "diff", "inspect", "open", "verify"]

E = TypeVar("E", bound=StrEnum)
Path = str | os.PathLike[str]


def inspect(
    source: Path,
    *,
    keys: Iterable[str] = (),
    section: str | None = None,
    ranks: bool = False,
    stats: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Description:
    """What is at ``source``: recognised layout, container, flavor, tensors, param groups, problems.

    Reads headers and metadata only, unless ``stats``. ``ranks`` locates every piece in its file. ``keys`` are globs
    over dotted keys. ``.to_json(ranks=...)`` gives the document of ``fsdpckpt inspect --json``. Raises SourceError.
    """
    from fsdpckpt.describe import Selection, describe
    from fsdpckpt.readers.detect import open_checkpoint

    wanted = Selection(tuple(keys), _enum(Section, section, "section"))
    with Sources() as sources:
        checkpoint = open_checkpoint(os.fspath(source), sources=sources, locate=ranks or stats)
        measure = _measure(checkpoint, sources, threads, progress) if stats else None
        return describe(checkpoint, wanted, measure=measure)


def _measure(
    checkpoint: Checkpoint, sources: Sources, threads: int | None, progress: Progress | None
) -> Callable[[list[NamedTensor]], list[dict[str, Json] | None]]:
    from fsdpckpt.ir.coverage import flaws
    from fsdpckpt.progress import NoProgress
    from fsdpckpt.verify.parallel import DEFAULT_THREADS
    from fsdpckpt.verify.stats import stats_of

    stages = progress if progress is not None else NoProgress()

    def measure(tensors: list[NamedTensor]) -> list[dict[str, Json] | None]:
        """None for a tensor that is not whole: its problem is listed, and the others still have statistics."""
        whole = [number for number, named in enumerate(tensors) if not flaws(named.tensor)]
        stages.begin("stats", sum(tensors[number].tensor.nbytes for number in whole))
        values = stats_of(
            checkpoint,
            [tensors[number] for number in whole],
            sources=sources,
            threads=threads if threads is not None else DEFAULT_THREADS,
            advance=stages.advance,
        )
        stages.end()
        found: list[dict[str, Json] | None] = [None] * len(tensors)
        for number, value in zip(whole, values, strict=True):
            found[number] = dataclasses.asdict(value) if value is not None else None
        return found

    return measure


def convert(
    source: Path,
    target: Path,
    options: ConvertOptions | None = None,
    *,
    progress: Progress | None = None,
    **named: object,
) -> Report:
    """Convert ``source`` to ``target``; options by the names of the command line: ``to="full"``, ``world_size=3``, ...

    ``options`` is a complete ``ConvertOptions``; single options on top of it replace its fields. Raises UsageError for
    an option that does not exist, and the errors of ``fsdpckpt convert``.
    """
    from fsdpckpt.converters.convert import convert as run

    chosen = _with_options(options if options is not None else ConvertOptions(), named)
    stages = progress
    if stages is None:
        from fsdpckpt.progress import NoProgress

        stages = NoProgress()
    return run(os.fspath(source), os.fspath(target), chosen, stages)


def diff(
    a: Path,
    b: Path,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    only: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Difference:
    """Compare two checkpoints logically, whatever their layouts, containers, key types and world sizes.

    Every byte counts, or with ``rtol``/``atol`` (as ``torch.allclose``) numbers that close are equal. ``only``
    compares one section. Raises NeedsInformationError when id and name keys cannot be matched, SourceError.
    """
    from fsdpckpt.progress import NoProgress
    from fsdpckpt.readers.detect import open_checkpoint
    from fsdpckpt.verify.compare import compare, only_section
    from fsdpckpt.verify.parallel import DEFAULT_THREADS
    from fsdpckpt.verify.tensors import Tolerance

    stages = progress if progress is not None else NoProgress()
    section = _enum(Section, only, "only")
    tolerance = None if rtol is None and atol is None else Tolerance(rtol or 0.0, atol or 0.0)
    with Sources() as sources:
        pair = [open_checkpoint(os.fspath(one), sources=sources, locate=True) for one in (a, b)]
        one, other = (only_section(checkpoint, section) for checkpoint in pair)
        stages.begin("compare", sum(named.tensor.nbytes for named in one.tensors()))
        result = compare(
            one,
            other,
            sources=sources,
            tolerance=tolerance,
            threads=threads if threads is not None else DEFAULT_THREADS,
            advance=stages.advance,
        )
        stages.end()
        return result


def verify(
    source: Path,
    *,
    digests: bool = False,
    finite: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Prove the checkpoint at ``source`` whole: ``.problems`` lists all that is wrong, ``.whole`` says if nothing is.

    ``digests`` adds a layout-independent SHA-256 per tensor, ``finite`` reports NaN and Inf. Raises SourceError (exit
    code 3) when the source cannot be read as a checkpoint at all.
    """
    from fsdpckpt.verify.run import verify as run

    return run(os.fspath(source), digests=digests, finite=finite, threads=threads, progress=progress)


def open(source: Path) -> LazyCheckpoint:  # noqa: A001  # the contract's name: fsdpckpt.open(src)
    """A lazy checkpoint: names to tensors that are read on demand. Use it in a ``with`` block. Raises SourceError."""
    from fsdpckpt.lazy import LazyCheckpoint
    from fsdpckpt.readers.detect import open_checkpoint

    sources = Sources()
    try:
        return LazyCheckpoint(open_checkpoint(os.fspath(source), sources=sources, locate=True), sources)
    except BaseException:
        sources.__exit__()
        raise


def _with_options(options: ConvertOptions, named: dict[str, object]) -> ConvertOptions:
    known = {field.name for field in dataclasses.fields(ConvertOptions)}
    for name in named:
        if name not in known:
            raise UsageError(f"convert has no option {name!r}", expected=", ".join(sorted(known)), found=name)
    return dataclasses.replace(options, **{name: _option(name, value) for name, value in named.items()})  # type: ignore[arg-type]


_ENUMS: dict[str, type[StrEnum]] = {
    "to": Layout,
    "container": Container,
    "only": Section,
    "tensor": TensorForm,
    "verify": VerifyLevel,
}
_TUPLES = frozenset({"buffers", "include", "exclude"})
_DTYPES = frozenset({"dtype", "optim_dtype"})
_SIZES = frozenset({"max_memory", "max_shard_size"})


def _option(name: str, value: object) -> object:
    """A value as ``ConvertOptions`` holds it: strings become enums and byte counts, lists tuples."""
    if name in _ENUMS and isinstance(value, str):
        return _enum(_ENUMS[name], value, name)
    if name in _TUPLES:
        return (value,) if isinstance(value, str) else tuple(value)  # type: ignore[arg-type]
    if name == "rename":
        pairs = value.items() if isinstance(value, dict) else value
        return tuple((str(old), str(new)) for old, new in pairs)  # type: ignore[attr-defined]
    if name in _SIZES and isinstance(value, str):
        try:
            return parse_size(value)
        except (ValueError, OverflowError):
            option = "--" + name.replace("_", "-")
            raise UsageError(
                f"{option} takes a size, and {value!r} is none", next_step=f"{option} 128MiB, or 5GB, or 1000 (bytes)"
            ) from None
    if name == "reference" and value is not None and not (isinstance(value, str) and is_url(value)):
        return os.fspath(value)  # type: ignore[call-overload]
    # torch.bfloat16 itself, without an import of torch
    return str(value).removeprefix("torch.") if name in _DTYPES and not isinstance(value, str | None) else value


def _enum(kind: type[E], value: str | None, name: str) -> E | None:
    if value is None:
        return None
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(kind)
        raise UsageError(f"{name} cannot be {value!r}", expected=choices, found=value) from None
