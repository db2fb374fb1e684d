"""What the options say about units; reads the file of parameter names that one of them gives."""

from __future__ import annotations

from collections import Counter

from fsdpckpt import flags
from fsdpckpt.errors import SourceCorruptError, SourceMissingError, UsageError
from fsdpckpt.flat.units.request import UnitsRequest
from fsdpckpt.ir.dtypes import DTYPES
from fsdpckpt.ir.units import Groups
from fsdpckpt.options import ConvertOptions


def listed_parameters(options: ConvertOptions) -> Groups:
    """The names in the file of ``--parameters``, as blank lines divide them; none without the option.

    To be asked once: a pipe has them only once. Raises SourceMissingError if the file cannot be read.
    """
    return _listed(options.parameters) if options.parameters is not None else ()


def units_request(options: ConvertOptions, listed: Groups) -> UnitsRequest:
    """The options about units. ``listed``: the names in the file of ``--parameters``, if ``options`` have it."""
    parts = listed if options.parameters is not None else ()
    return UnitsRequest(
        file=options.units,
        globs=options.unit,
        use_orig_params=options.use_orig_params,
        strategy=options.strategy,
        param_dtype=DTYPES[options.param_dtype] if options.param_dtype is not None else None,
        shard_size=options.shard_size,
        reference=options.reference,
        parameters=tuple(name for part in parts for name in part) if parts else None,
        parameter_groups=parts,
        buffers=options.buffers,
        one_group=bool(options.mesh) and options.strategy is None and options.shard_size is None,
    )


def _listed(path: str) -> Groups:
    """The names in the file of ``--parameters``, as blank lines divide them."""
    next_step = "write the names of model.named_parameters() into a text file, one per line"
    parts: list[list[str]] = [[]]
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                if line.strip():
                    parts[-1].append(line.strip())
                elif parts[-1]:
                    parts.append([])
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path, bytes that are no text
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise SourceMissingError(f"{flags.parameters(path)}: {reason}", file=path, next_step=next_step) from error
    names = [name for part in parts for name in part]
    twice = [name for name, times in Counter(names).items() if times > 1]
    if not names:
        raise UsageError(
            f"{flags.parameters(path)} names no parameter: the file is empty", file=path, next_step=next_step
        )
    if twice:
        raise SourceCorruptError(
            f"{flags.parameters(path)} names some parameters more than once",
            details=twice,
            file=path,
            next_step=next_step,
        )
    return tuple(tuple(part) for part in parts if part)
