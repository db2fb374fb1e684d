"""What the options about units say of each of several models and optimizers: each model has units of its own.

A glob of ``--unit`` is for every model in which it matches a module. One that matches in none of them and begins with a
section's keys, as ``critic.layers.*`` does, is for that section alone. A glob of ``--buffers`` is for every model that
has such a name. A units file is for the sections of whose model it is, by names and shapes, and a reference says of
each section what its section of the same name does. ``--parameters`` lists the names of all models, one model after the
other: a name that begins with a section's keys is for that section alone, any other for each that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from fsdpckpt.flat.units.build import any_module
from fsdpckpt.flat.units.request import UnitsRequest, load_units
from fsdpckpt.globs import matches
from fsdpckpt.ir import Layout
from fsdpckpt.ir.buffers import NO_BUFFERS
from fsdpckpt.ir.checkpoint import Checkpoint, ModelState, NamedSection, Section
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.sections import model_of
from fsdpckpt.ir.units import Groups, Units
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.listings import model_names, whole_tensors
from fsdpckpt.transform.selection import parameter_names
from fsdpckpt.transform.stated_orders import groups_by_user


def request_of_section(
    request: UnitsRequest, checkpoint: Checkpoint, section: NamedSection | None, sources: Sources
) -> UnitsRequest:
    """What ``request`` says of ``section`` of ``checkpoint``, None for its main ones."""
    view = _view(checkpoint, section)
    names = _names(view)
    request = replace(request, sections=labels_of(checkpoint, section))
    if view.model is not None and checkpoint.layout is not Layout.FLATTENED:  # else names come from elsewhere, too
        request = replace(request, buffers=_buffers(request.buffers, checkpoint, names))
    if request.file is not None and not _is_for(request.file, checkpoint, section, sources):
        request = replace(request, file=None)
    request = with_parameters_of_section(request, checkpoint, section)
    return replace(request, globs=_globs(request.globs, checkpoint, section, names) if request.globs else ())


def with_parameters_of_section(
    request: UnitsRequest, checkpoint: Checkpoint, section: NamedSection | None
) -> UnitsRequest:
    """``request`` with what its list of parameters says of ``section``, None for the main ones."""
    if request.parameters is None or not checkpoint.named:
        return request
    parts = _parameters(request.parameter_groups, checkpoint, section)
    parts = () if _lists_an_optimizer(parts, checkpoint, section) else parts
    return replace(request, parameters=tuple(chain(*parts)) or None, parameter_groups=parts)


def labels_of(checkpoint: Checkpoint, section: NamedSection | None) -> tuple[str, ...]:
    """The labels of ``section`` and, for an optimizer, of its model: another checkpoint of the job has them too."""
    if section is None:
        return ()
    model = model_of(checkpoint, section) if section.section is Section.OPTIM else None
    return (section.label, *(named.label for named in checkpoint.named if named.content is model))


def places_of(checkpoint: Checkpoint, section: NamedSection | None) -> tuple[str, ...]:
    """The keys and the name of ``section`` and, for an optimizer, of its model: what a glob for that says is about its
    states.
    """
    labels = labels_of(checkpoint, section)
    own = [named for named in checkpoint.named if named.label in labels]
    return tuple(dict.fromkeys([*(named.dotted for named in own), *(named.name for named in own)]))


def _view(checkpoint: Checkpoint, section: NamedSection | None) -> Checkpoint:
    """``section`` as the main one, None for that which is; an optimizer with its model. For names alone: unlike
    ``ir.sections.alone`` it does not look for the other optimizers of each model.
    """
    if section is None:
        return checkpoint
    if isinstance(section.content, ModelState):
        return replace(checkpoint, model=section.content, optim=None)
    return replace(checkpoint, model=model_of(checkpoint, section), optim=section.content)


def _names(checkpoint: Checkpoint) -> list[str]:
    """The names of the parameters, and of flat parameters, without prefixes of wrappers."""
    return [clean(name) for name in parameter_names(checkpoint)]


def _names_of_all(checkpoint: Checkpoint) -> list[str]:
    """The names of every section."""
    return [name for section in (None, *checkpoint.named) for name in _names(_view(checkpoint, section))]


def _is_for(path: str, checkpoint: Checkpoint, section: NamedSection | None, sources: Sources) -> bool:
    """Whether the units file at ``path`` may be that of ``section``. One whose shapes no section has is for all that
    have its names, which refuse it.
    """
    units = load_units(path, sources, labels_of(checkpoint, section))
    view = _view(checkpoint, section)
    if not _describes(units, _names(view)):
        return False
    return _fits(units, view) or not any(_fits(units, _view(checkpoint, each)) for each in (None, *checkpoint.named))


def _describes(units: Units | None, names: Sequence[str]) -> bool:
    """Whether ``units`` may be those of the model with these ``names``: nothing contradicts it if none is known, as of
    an optimizer that has ids alone.
    """
    if units is None:
        return False
    known = {*units.params(), *(later for later, _ in units.shared), *(unit.key for unit in units.units)}
    return not names or not known.isdisjoint(names)


def _fits(units: Units | None, view: Checkpoint) -> bool:
    """Whether no whole tensor of the model of ``view`` has another shape than in ``units``, and one has the same."""
    if units is None or view.model is None:
        return False
    params = units.params()
    shapes = ((params.get(clean(key)), leaf.shape) for key, leaf in whole_tensors(view.model))
    same = [param.shape == shape for param, shape in shapes if param is not None]
    return bool(same) and all(same)


def _parameters(parts: Groups, checkpoint: Checkpoint, section: NamedSection | None) -> Groups:
    """What ``parts`` of ``--parameters`` list of ``section``. A name that no model has is for all, which refuse it."""
    own_names = set(_names(_view(checkpoint, section)))
    names_of_all = {*_names_of_all(checkpoint)}
    own, others = _places(checkpoint, section), _places(checkpoint, *checkpoint.named)
    prefixed = any(clean(name).startswith(own) for part in parts for name in part) if own else False
    taken: list[tuple[str, ...]] = []
    for part in parts:
        names: list[str] = []
        for name in map(clean, part):
            if name in names_of_all:
                names += [name] if name in own_names and not prefixed else []
            elif name.startswith(own):
                names += [name.removeprefix(place) for place in own if name.startswith(place)][:1]
            elif not name.startswith(others) and not prefixed:
                names.append(name)
        taken.append(tuple(names))
    return tuple(part for part in taken if part)


def _lists_an_optimizer(parts: Groups, checkpoint: Checkpoint, section: NamedSection | None) -> bool:
    """Whether ``parts`` list the parameters of an optimizer of the model ``section`` in the order of that optimizer,
    which says nothing of the model's.
    """
    view = _view(checkpoint, section)
    if section is None or section.section is not Section.MODEL or view.model is None or not parts:
        return False
    listing = model_names(view, section.label)
    position: dict[str, int] | None = None
    if listing is not None and listing.ordered:
        position = {name: place for place, name in enumerate(listing.names)}
    names = tuple(chain(*parts))
    return any(
        not isinstance(named.content, ModelState)
        and model_of(checkpoint, named) is view.model
        and groups_by_user(names, parts, named.content, position) is not None
        for named in checkpoint.named
    )


def _buffers(globs: tuple[str, ...], checkpoint: Checkpoint, names: Sequence[str]) -> tuple[str, ...]:
    """The ``globs`` of buffers that are for the section with these ``names``, which has none if they are all for
    others. One that matches nowhere is for all sections, which refuse it.
    """
    if not globs or globs == NO_BUFFERS:
        return globs
    names_of_all = _names_of_all(checkpoint)
    taken: list[str] = []
    for glob in globs:
        matches_here = any(matches(name, glob) for name in names)
        if matches_here or not any(matches(name, glob) for name in names_of_all):
            taken.append(glob)
    return tuple(taken) or NO_BUFFERS


def _globs(
    globs: Sequence[str], checkpoint: Checkpoint, section: NamedSection | None, names: Sequence[str]
) -> tuple[str, ...]:
    """The globs that are for ``section``. One that matches nowhere is for all sections, which refuse it."""
    names_of_all = _names_of_all(checkpoint)
    own = _places(checkpoint, section)
    others = _places(checkpoint, *checkpoint.named)
    taken: list[str] = []
    for glob in globs:
        matches_as_it_is = any_module((glob,), names_of_all)
        if matches_as_it_is and any_module((glob,), names):
            taken.append(glob)
        elif not matches_as_it_is and glob.startswith(own):
            taken += [glob.removeprefix(place) for place in own if glob.startswith(place)][:1]
        elif not matches_as_it_is and not glob.startswith(others):
            taken.append(glob)
    return tuple(taken)


def _places(checkpoint: Checkpoint, *sections: NamedSection | None) -> tuple[str, ...]:
    """What a glob for one of ``sections`` begins with: its keys, or those of its model."""
    places = (place for section in sections for place in places_of(checkpoint, section))
    return tuple(f"{place}." for place in dict.fromkeys(places))
