"""Chooses the form of the output: by default that of the source's framework, otherwise that of ``--flavor``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches

from fsdpckpt import flags
from fsdpckpt.errors import UsageError
from fsdpckpt.flags import Flag
from fsdpckpt.ir import Container, Layout, Section
from fsdpckpt.ir.checkpoint import Checkpoint, Note
from fsdpckpt.options import ConvertOptions
from fsdpckpt.producers import PLAIN, Flavor, Form, PathKey
from fsdpckpt.producers.recognition import flavor_named, foreign_flavors, forms_for, layout_of_form
from fsdpckpt.producers.table import HUGGINGFACE, WRITABLE

_PLAIN = "the target is plain"


_ALIASES = {"hf": HUGGINGFACE.name, "transformers": HUGGINGFACE.name}


def writable_flavor(name: str, option: Flag = flags.flavor) -> Flavor:
    """Look up a flavor by name, the value of ``option``. Raises UsageError for one that cannot be written."""
    flavor = flavor_named(name)
    if flavor is None or not flavor.forms:
        writable = (*WRITABLE, *(foreign.name for foreign in foreign_flavors() if foreign.forms))
        names = [each for each in writable if option == flags.flavor or each != PLAIN]
        near = get_close_matches(_ALIASES.get(name.lower(), name.lower()), names, n=1) if flavor is None else []
        what = "is a flavor that fsdpckpt reads, but does not write" if flavor is not None else "is an unknown flavor"
        raise UsageError(
            f"{option(name)} {what}",
            expected=", ".join(names),
            found=name,
            next_step=f"{option(near[0])}" if near else f"choose one of these, or drop {option}",
        )
    return flavor


def is_per_rank(layout: Layout, container: Container) -> bool:
    """Whether the form has files for each rank."""
    return layout is Layout.FLATTENED or (layout is Layout.SHARDED and container is Container.TORCH)


def ranks_of(flavor: Flavor, form: Form, options: ConvertOptions, source: Checkpoint) -> int | None:
    """The target's world size: ``--world-size``, else the source's if its rank files are kept."""
    keeps_ranks = _is_source_form(flavor, form, source) and is_per_rank(form.layout, form.container)
    return source.world_size if options.world_size is None and keeps_ranks else options.world_size


def default_form(suffix: str, options: ConvertOptions, source: Checkpoint) -> tuple[Flavor, Form] | Note | None:
    """The form of the source's framework to write without ``--flavor``, or a note that says why the target is plain.

    It has the layout the options ask for (else the source's) and a place for every section that is taken. None if the
    source is from no framework. ``suffix``: that of DST if its name is a file's, else "".
    """
    flavor = flavor_named(source.flavor)
    if flavor is None:
        return None
    if not flavor.forms:
        related = [*flavor.contained_in, *(name for name in WRITABLE if name.startswith(f"{flavor.name}-"))]
        others = f"{flags.flavor('NAME')} writes the form of another framework"
        resumes = f"What resumes with it: {flags.flavor(related[0])}" if related else others
        return Note("plain", f"{_PLAIN}: fsdpckpt reads the flavor {flavor.name}, but does not write it. {resumes}")
    layout = options.to or (Layout.FULL if suffix else _layout(flavor, source))
    fitting = [
        form
        for form in _fitting(flavor, suffix, options, source)
        if form.layout is layout and (not suffix or suffix == form.suffix) and _matches_request(form, options, source)
    ]
    if fitting:
        return flavor, _with_source_keys(_preferred(flavor, fitting, source), source)
    forms = forms_for(flavor, source)
    form = _preferred(flavor, list(forms), source)
    requested = _request_text(suffix, options) or "all that is taken from this source"
    if options.only is None and not any(_holds_named(each, source) for each in forms):
        requested = " and ".join(named.label for named in source.named)
        return Note(
            "plain", f"{_PLAIN}: flavor {flavor.name} does not save {requested}. {flags.only} takes one of them"
        )
    why = f"flavor {flavor.name} does not save {requested}"
    resumes = "resumes" if form.optim is not None else "loads"
    return Note(
        "plain", f"{_PLAIN}: {why}. What {resumes} with it: {flags.flavor(flavor.name)} {_describe_change(form)}"
    )


def _matches_request(form: Form, options: ConvertOptions, source: Checkpoint) -> bool:
    """Whether ``form`` has a place for the sections that are taken, a model among them, and matches the optimizer's
    keys.

    A DCP directory that only has the framework's file names may have keys that its loader does not expect.
    """
    if not source.has(Section.MODEL) or options.only is Section.OPTIM:
        return False
    if options.only is None and not _holds_named(form, source):
        return False
    if not source.has(Section.OPTIM) or options.only is Section.MODEL:
        return True
    both_dcp = form.container == source.container == Container.DCP
    if form.optim is None or (both_dcp and form.flattened != source.origin.flattened_keys):
        return False
    return form.any_key_type or options.key_type in (None, form.key_type)


def _holds_named(form: Form, source: Checkpoint) -> bool:
    """Whether the framework's loader takes the source's named sections: all models beside the main one that it keeps
    with the extras, and several optimizers only where it has names for them.
    """
    if not source.named or form.keeps_source_keys or form.several:
        return True
    optimizers = source.optim is None and any(named.section is Section.OPTIM for named in source.named)
    return bool(form.optimizers) if optimizers else form.extra is not None


def _with_source_keys(form: Form, source: Checkpoint) -> Form:
    """``form`` with the source's own keys, if the framework lets the user choose them and the user has chosen some."""
    if not form.keeps_source_keys or not _is_chosen_by_users(source.flavor):
        return form
    model, optim = (_chosen_keys(source, section) for section in (Section.MODEL, Section.OPTIM))
    if model is not None:
        form = replace(form, model=replace(form.model, keys=model))
    if optim is not None and form.optim is not None:
        form = replace(form, optim=replace(form.optim, keys=optim))
    return form


def _is_chosen_by_users(flavor: str) -> bool:
    """Whether the users of the framework name the sections: all files that no framework names are of their own
    making.
    """
    found = flavor_named(flavor)
    return flavor == PLAIN or (found is not None and any(form.keeps_source_keys for form in found.forms))


def _chosen_keys(source: Checkpoint, section: Section) -> tuple[PathKey, ...] | None:
    """The keys of a section in the source; None for one in a file of its own, or deeper than a loader looks."""
    path = tuple(key for key in source.origin.nesting.get(section, ()) if isinstance(key, (str, int)))
    return path if len(path) == 1 or (path and source.flavor != PLAIN) else None


def requested_form(flavor: Flavor, suffix: str, options: ConvertOptions, source: Checkpoint) -> Form:
    """The form of ``--flavor`` that best matches the options. Raises UsageError if none does."""
    fitting = _fitting(flavor, suffix, options, source)
    if not fitting:
        raise UsageError(
            f"{flags.flavor(flavor.name)} cannot be combined with "
            + _request_text(suffix, replace(options, key_type=None, only=None), " and "),
            expected="; ".join(dict.fromkeys(map(_describe_change, forms_for(flavor, source)))),
            next_step=_what_to_change(flavor, suffix, options, source),
        )
    form = _with_source_keys(_preferred(flavor, fitting, source), source)
    if form.optim is not None and not form.any_key_type and options.key_type not in (None, form.key_type):
        keys = f"keys its optimizer by {form.key_type}" if form.key_type else "has its own kind of keys in this form"
        raise UsageError(
            f"{flags.key_type(options.key_type)} cannot be combined with {flags.flavor(flavor.name)}, which {keys}",
            next_step=f"drop {flags.key_type}",
        )
    return form


def _fitting(flavor: Flavor, suffix: str, options: ConvertOptions, source: Checkpoint) -> list[Form]:
    """The forms of ``flavor`` that a target with these ``options``, and with ``suffix`` if it is a file, may have."""
    return [form for form in forms_for(flavor, source) if _fits(flavor, form, suffix, options, source)]


def _fits(flavor: Flavor, form: Form, suffix: str, options: ConvertOptions, source: Checkpoint) -> bool:
    if options.to not in (None, form.layout) or options.container not in (None, form.container):
        return False
    if suffix and form.directory:
        return False
    # A full checkpoint has no ranks to count, but for files that each of them writes beside it.
    has_ranks = form.layout is not Layout.FULL or _keeps_rank_files(flavor, form, source)
    return options.world_size is None or has_ranks


def _keeps_rank_files(flavor: Flavor, form: Form, source: Checkpoint) -> bool:
    """Whether a full checkpoint of the source's framework has a file for each rank: its random states."""
    return form.directory and bool(flavor.rank_files) and _is_source_form(flavor, form, source)


def _is_source_form(flavor: Flavor, form: Form, source: Checkpoint) -> bool:
    """Whether the source has this form."""
    return source.flavor == flavor.name and (form.layout, form.container) == (_layout(flavor, source), source.container)


def _preferred(flavor: Flavor, forms: list[Form], source: Checkpoint) -> Form:
    """The source's own form, else the first of its layout, else the first. Of two in which its framework saves the same
    files, that with the optimizer's keys nested or flattened as the source has them.
    """
    layout = _layout(flavor, source)

    def unlike_source(form: Form) -> tuple[bool, bool, bool]:
        own = _is_source_form(flavor, form, source)
        return form.layout is not layout, not own, own and form.flattened is not source.origin.flattened_keys

    return min(forms, key=unlike_source)


def _layout(flavor: Flavor, source: Checkpoint) -> Layout:
    """The source's layout, that of the form for the same framework."""
    return layout_of_form(source, flavor) if source.flavor == flavor.name else source.layout


def _what_to_change(flavor: Flavor, suffix: str, options: ConvertOptions, source: Checkpoint) -> str:
    """The smallest change to the options that makes one of the forms match."""
    without: Mapping[str, tuple[str, ConvertOptions]] = {
        f"drop {flags.container}": (suffix, replace(options, container=None)),
        f"drop {flags.to}": (suffix, replace(options, to=None)),
        f"drop {flags.world_size}": (suffix, replace(options, world_size=None)),
        "give DST a name without a suffix": ("", options),
        f"drop {flags.to} and {flags.container}": (suffix, replace(options, to=None, container=None)),
        f"drop {flags.to}, {flags.container} and {flags.world_size}": (
            suffix,
            replace(options, to=None, container=None, world_size=None),
        ),
    }
    for change, (changed_suffix, changed) in without.items():
        fitting = _fitting(flavor, changed_suffix, changed, source)
        if fitting:
            form = _preferred(flavor, fitting, source)
            needs_ranks = is_per_rank(form.layout, form.container) and ranks_of(flavor, form, changed, source) is None
            return f"{change}, and add {flags.world_size('N')}" if needs_ranks else change
    return f"drop {flags.to}, {flags.container} and {flags.world_size}, and give DST a name without a suffix"


def _describe_change(form: Form) -> str:
    ranks = f" {flags.world_size('N')}" if is_per_rank(form.layout, form.container) else ""
    return (
        f"{flags.to(form.layout)} {flags.container(form.container)}" + ranks + ("" if form.directory else ", one file")
    )


def _request_text(suffix: str, options: ConvertOptions, between: str = ", ") -> str:
    given = [f"{flags.to(options.to)}"] if options.to is not None else []
    given += [f"{flags.container(options.container)}"] if options.container is not None else []
    given += [f"{flags.world_size(options.world_size)}"] if options.world_size is not None else []
    given += [f"{flags.key_type(options.key_type)}"] if options.key_type is not None else []
    given += [f"{flags.only(options.only)}"] if options.only is not None else []
    return between.join([*given, *([f"one {suffix} file"] if suffix else [])])
