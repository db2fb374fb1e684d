"""Lists all frameworks, those that are only read included, and recognises one by its files and keys."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fsdpckpt.producers.forms import PLAIN, Flavor, Sign
from fsdpckpt.producers.huggingface import ACCELERATE, HUGGINGFACE, TRAINER, WEIGHTS
from fsdpckpt.producers.lightning import FABRIC, LIGHTNING, LIGHTNING_MODEL_PARALLEL
from fsdpckpt.producers.torchtitan import TORCHTITAN, TORCHTITAN_OLD
from fsdpckpt.producers.verl import VERL

COMPOSER = Flavor(
    name="composer",
    title="Composer",
    signs=(Sign((r"^\.metadata$", r"^\.\./ep\d+-ba\d+$")), Sign(keys=("state", "rng"))),
)

TORCHTUNE = Flavor(
    name="torchtune",
    title="torchtune",
    signs=(Sign((r"^recipe_state\.pt$",)), Sign((r"^\.metadata$", r"^\.\./(dist_)?epoch_\d+$"))),
)


_RANK = r"^rank\d+-of-\d+-(model|optimizer|optim|pytorch_model|adapter_model)\.(bin|pt|pth)$"
_OTHER = r"[_-]rank-\d{8}-of-\d{8}\.pth?$"

TORCH_XLA = Flavor(
    name="torch_xla",
    title="torch_xla's FSDP",
    signs=(Sign((_RANK,)), Sign((_OTHER,))),
    state=rf"{_RANK}|{_OTHER}",
    model_files="",
    exports=(WEIGHTS, r"_consolidated\.pth$"),
)

DEEPSPEED = Flavor(
    name="deepspeed",
    title="DeepSpeed's save_checkpoint",
    signs=(Sign((r"_optim_states\.pt$",)), Sign((r"^latest$", r"^zero_to_fp32\.py$"))),
    state=r"_(optim|model)_states\.pt$|^latest$|^zero_to_(fp32|torch)\.py$",
    model_files="",
)

FAIRSCALE = Flavor(
    name="fairscale", title="fairscale's FSDP", signs=(), state=r"[_.-]shard[_-]?\d+\.[^.]+$", model_files=""
)

FLAVORS: tuple[Flavor, ...] = (  # the first whose sign is present wins
    TRAINER, ACCELERATE, VERL, LIGHTNING_MODEL_PARALLEL, LIGHTNING, FABRIC, COMPOSER, TORCHTUNE, TORCHTITAN,
    TORCHTITAN_OLD, TORCH_XLA, FAIRSCALE, DEEPSPEED, HUGGINGFACE,
)  # fmt: skip

WRITABLE = (PLAIN, *sorted(flavor.name for flavor in FLAVORS if flavor.forms))

EXPORT_DIRECTORIES = frozenset(name for flavor in FLAVORS for name in flavor.export_directories)


def flavor_named(name: str) -> Flavor | None:
    """The framework of this name; None for ``plain`` and unknown names."""
    return next((flavor for flavor in FLAVORS if flavor.name == name), None)


def recognise(
    names: Iterable[str],
    *,
    directory: str = "",
    keys: Iterable[object] = (),
    model: tuple[object, ...] | None = None,
    flattened: bool = False,
) -> Flavor | None:
    """The framework whose sign is among the file ``names`` of ``directory`` and the top-level ``keys``, or None.

    ``model`` and ``flattened``: of a DCP checkpoint's keys, as in ``Sign``.
    """
    base = directory.rstrip("/").rpartition("/")[2]
    entries, top = [*names, f"../{base}"], set(keys)

    def shown(sign: Sign) -> bool:
        return (
            all(any(re.search(pattern, name) for name in entries) for pattern in sign.files)
            and top.issuperset(sign.keys)
            and sign.model in (None, model)
            and sign.flattened in (None, flattened)
        )

    return next((flavor for flavor in FLAVORS if any(map(shown, flavor.signs))), None)


def belongs(flavor: Flavor | None, path: str) -> bool:
    """Whether ``flavor``, or the export of any framework, has a file at ``path`` below the checkpoint's directory."""
    folder, _, name = path.rpartition("/")
    if folder in EXPORT_DIRECTORIES and re.search(WEIGHTS, name):
        return True
    if flavor is None:
        return False
    names = {kind.single for kind in flavor.rank_files}
    patterns = (flavor.state, flavor.side_files, *flavor.exports)
    return path in names or copied_by_rank(path) or any(re.search(pattern, path) for pattern in patterns)


def copied_by_rank(name: str) -> bool:
    """Whether each rank has a side file of this name in some framework: new ranks get copies of it."""
    return any(kind.rank_of(name) is not None for flavor in FLAVORS for kind in flavor.rank_files)


def export_files(names: Iterable[str]) -> set[str]:
    """The files of one directory that hold a second copy of the model, for other programs."""
    known = list(names)
    flavor = recognise(known)
    patterns = flavor.exports if flavor is not None else ()
    return {name for name in known if any(re.search(pattern, name) for pattern in patterns)}
