"""Finds the framework that saved a checkpoint, by its files and keys or by its name, and says which files are its own.

The frameworks are those of ``producers.table`` and of installed packages.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache

from fsdpckpt.extensions import FLAVORS as ENTRY_POINTS
from fsdpckpt.extensions import extensions
from fsdpckpt.ir import Container, IdRule, Layout
from fsdpckpt.ir.adapters import is_adapter
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.producers.flavors import PLAIN, Flavor, Form, Signature
from fsdpckpt.producers.table import ADAPTER, EXPORT_DIRECTORIES, FLAVORS, WEIGHTS


@cache
def foreign_flavors() -> tuple[Flavor, ...]:
    """The flavors that installed packages announce, with the package in place of the versions that were tried.

    Raises UsageError for one that is no flavor, or has the name of one of ours.
    """
    found = []
    ours = {PLAIN, *(flavor.name for flavor in FLAVORS)}
    for extension in extensions(ENTRY_POINTS):
        flavor = extension.value
        if not isinstance(flavor, Flavor) or flavor.name in ours:
            expected = "a fsdpckpt.producers.Flavor with a name that no other has"
            given = f"the flavor {flavor.name}" if isinstance(flavor, Flavor) else type(flavor).__name__
            raise extension.refused("is not a flavor of its own", expected, given)
        with extension.running("has a pattern that is no regular expression"):
            for pattern in _patterns(flavor):
                re.compile(pattern)
        found.append(replace(flavor, tested=extension.origin))
    return tuple(found)


def recognise_folder(names: Iterable[str]) -> Flavor | None:
    """The first framework of which one sign names several files, all among ``names``, whatever is in them: of a
    directory that is not read yet.
    """
    listed = list(names)
    for flavor in all_flavors():
        for sign in flavor.signs:
            if len(sign.files) > 1 and _has_files_of(sign, listed):
                return flavor
    return None


def _patterns(flavor: Flavor) -> Iterator[str]:
    for sign in flavor.signs:
        yield from sign.files
    yield from (flavor.state, flavor.side_files, flavor.exports_beside, *flavor.exports, *flavor.training_files)


def all_flavors() -> tuple[Flavor, ...]:
    """Every framework: those of other packages first, as they may save in the form of another one."""
    return (*foreign_flavors(), *FLAVORS)


def forms_for(flavor: Flavor, checkpoint: Checkpoint) -> tuple[Form, ...]:
    """The forms of ``flavor`` in which it saves such a model: an adapter alone, or any other."""
    if not any(form.adapter for form in flavor.forms):
        return flavor.forms
    adapter = checkpoint.model is not None and is_adapter(checkpoint.model.params)
    return tuple(form for form in flavor.forms if form.adapter is adapter)


def layout_of_form(checkpoint: Checkpoint, flavor: Flavor) -> Layout:
    """The layout of the form of ``flavor`` that ``checkpoint`` has: sharded also where one rank saved all, if its files
    are those of a sharded form.
    """
    forms = {(form.layout, form.container) for form in flavor.forms}
    container = checkpoint.container
    by_one_rank = checkpoint.layout is Layout.FULL and container in (Container.DCP, Container.SAFETENSORS)
    if by_one_rank and (Layout.FULL, container) not in forms and (Layout.SHARDED, container) in forms:
        return Layout.SHARDED
    return checkpoint.layout


def id_rule_of(checkpoint: Checkpoint) -> IdRule:
    """How the framework that saved ``checkpoint`` counts the ids of an optimizer: nobody else knows it."""
    found = flavor_named(checkpoint.flavor)
    for form in found.forms if found is not None else ():
        if (form.layout, form.container) == (checkpoint.layout, checkpoint.container):
            return form.id_rule
    return IdRule.GROUPS


def flavor_named(name: str) -> Flavor | None:
    """The framework of this name; None for ``plain`` and unknown names."""
    return next((flavor for flavor in all_flavors() if flavor.name == name), None)


def recognise(
    names: Iterable[str],
    *,
    directory: str = "",
    keys: Iterable[object] = (),
    model: tuple[object, ...] | None = None,
    optim: tuple[object, ...] | None = None,
    flattened: bool = False,
) -> Flavor | None:
    """The first framework that matches the file ``names`` of ``directory`` and the top-level ``keys``, or None.

    ``model``, ``optim`` and ``flattened``: of a DCP checkpoint's keys, as in ``Signature``.
    """
    base = directory.rstrip("/").rpartition("/")[2]
    return _recognise((*names, f"../{base}"), frozenset(keys), model, optim, flattened=flattened)


@lru_cache(maxsize=16)  # a directory is asked about several times, and may have thousands of names
def _recognise(
    entries: tuple[str, ...],
    top: frozenset[object],
    model: tuple[object, ...] | None,
    optim: tuple[object, ...] | None,
    *,
    flattened: bool,
) -> Flavor | None:
    def matches(sign: Signature) -> bool:
        return (
            _has_files_of(sign, entries)
            and top.issuperset(sign.keys)
            and sign.model in (None, model)
            and sign.optim in (None, optim)
            and sign.flattened in (None, flattened)
        )

    return next((flavor for flavor in all_flavors() if any(map(matches, flavor.signs))), None)


def _has_files_of(sign: Signature, names: Sequence[str]) -> bool:
    """Whether each pattern of ``sign`` is found in one of ``names``."""
    return all(any(map(re.compile(pattern).search, names)) for pattern in sign.files)


def belongs(flavor: Flavor | None, path: str) -> bool:
    """Whether a file at ``path`` below a checkpoint's directory is ``flavor``'s, or of an export of any framework."""
    folder, _, name = path.rpartition("/")
    if folder in EXPORT_DIRECTORIES and re.search(f"{WEIGHTS}|{ADAPTER}", name):
        return True
    if flavor is None:
        return False
    names = {file.single for file in flavor.rank_files}
    patterns = (flavor.state, flavor.side_files, *flavor.exports)
    beside = any(path.startswith(f"{directory}/") for directory in flavor.side_directories)
    return beside or path in names or copied_by_rank(path) or fits_any(patterns, path)


def copied_by_rank(path: str) -> bool:
    """Whether each rank of some framework has a side file at this ``path``: ranks that are new get copies."""
    words = path.split("/")
    kinds = (file for flavor in all_flavors() for file in flavor.rank_files)
    return any(kind.rank_of("/".join(words[-kind.name.count("/") - 1 :])) is not None for kind in kinds)


def export_files(names: Iterable[str]) -> set[str]:
    """The files of one directory that hold a second copy of the model, for other programs."""
    listed = list(names)
    flavor = recognise(listed)
    if flavor is None or (flavor.exports_beside and not any(re.search(flavor.exports_beside, name) for name in listed)):
        return set()
    return {name for name in listed if fits_any(flavor.exports, name)}


def fits_any(patterns: Iterable[str], name: str) -> bool:
    """Whether one of ``patterns``, regular expressions of the table, is found in the ``name`` of a file."""
    return any(re.search(pattern, name) for pattern in patterns)
