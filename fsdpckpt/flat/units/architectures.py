"""The units of a model of Hugging Face's from its ``config.json`` and the headers of its weights (``units --config``).

Safetensors files sort their names, and flat parameters follow ``model.parameters()``. Its order, and which modules are
of a class, stand in ``architectures.json``, which ``scripts/architectures`` writes from transformers. No model code
runs.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn, TypeAlias

from fsdpckpt import flags
from fsdpckpt.errors import (
    FsdpckptError,
    InternalError,
    NeedsInformationError,
    SourceMissingError,
    SourceUnsupportedError,
    UsageError,
)
from fsdpckpt.flags import Wording
from fsdpckpt.flat.names import UnitPrefixes
from fsdpckpt.flat.units.build import ROOT_ONLY, module_paths
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.listing import Listing
from fsdpckpt.ir.model_config import CONFIG, disagreements
from fsdpckpt.ir.parameters import Parameter
from fsdpckpt.readers.detect import open_checkpoint
from fsdpckpt.readers.model_config import config_fields
from fsdpckpt.readers.protocol import Locate
from fsdpckpt.storage.sources import Sources
from fsdpckpt.transform.listings import model_names

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_MOST_NAMES = 10  # of a model that differs, in an error
_INSTEAD = "call save_units in the training script, or build the model with its code: " + flags.command(
    "units", flags.model("MODULE:NAME"), flags.wrap("MODULE:CLASS")
)

_Place: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Architecture:
    """The parameters of one class of models, as transformers builds it.

    ``parameters``: their names in the order of ``model.parameters()``, with ``{}`` for the number of a layer;
    ``optional``: those that only some configurations have. ``kinds``: where the layers of one model differ, the
    parameters that not all of them have, for each kind of layer. ``buffers``: what weight files hold besides.
    ``stored``: the map that makes the parameters of what weight files hold, "" if they hold the parameters themselves.
    ``modules``: the paths of the modules of each class.
    ``layers``: the classes that are usually wrapped. ``tied``: a parameter, and the one that it is if embeddings are
    tied; ``tied_by_default``: what holds if ``config.json`` does not say. ``since``, ``before``: the versions of
    transformers that build it so, None without a limit.
    """

    name: str
    parameters: tuple[str, ...]
    optional: frozenset[str]
    kinds: tuple[frozenset[str], ...]
    buffers: frozenset[str]
    stored: str
    modules: Mapping[str, Sequence[str]]
    layers: tuple[str, ...]
    tied: Mapping[str, str]
    tied_by_default: bool
    since: str | None = None
    before: str | None = None

    def is_of(self, version: str) -> bool:
        """Whether transformers of this ``version`` builds it so."""
        number = _number(version)
        too_old = self.since is not None and number < _number(self.since)
        return not too_old and (self.before is None or number < _number(self.before))

    @property
    def versions(self) -> str:
        """``transformers before 4.47``."""
        return (
            f"transformers before {self.before}" if self.before is not None else f"transformers {self.since} or newer"
        )

    def in_order(self, names: Iterable[str]) -> list[str]:
        """``names`` in the order of ``model.parameters()``: layers by their numbers."""
        places: dict[str, int] = {}  # of each part of a path below its parent, as the parameters list them
        for parameter in self.parameters:
            for path in _paths(parameter):
                places.setdefault(path, len(places))

        def place(name: str) -> _Place:
            numbers = iter(_NUMBER.findall(name))
            steps: list[int] = []
            for path in _paths(template(name)):
                steps += (places[path], int(next(numbers)) if path.endswith("{}") else 0)
            return tuple(steps)

        return sorted(names, key=place)


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _paths(name: str) -> Iterator[str]:
    words = name.split(".")
    for depth in range(1, len(words) + 1):
        yield ".".join(words[:depth])


def template(name: str) -> str:
    """``name`` with ``{}`` for the numbers of layers."""
    return _NUMBER.sub("{}", name)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """What the directory of a base model says: the names of its parameters, in order, and its class."""

    architecture: Architecture
    names: Listing

    def prefixes(self, classes: Sequence[str]) -> UnitPrefixes:
        """The modules of ``classes`` (``LlamaDecoderLayer``, or ``module:LlamaDecoderLayer``), and the root."""
        known = self.architecture.modules
        wrapped: set[str] = set()
        for given in () if tuple(classes) == (ROOT_ONLY,) else classes:
            name = re.split(r"[.:]", given)[-1]
            if name not in known:
                raise UsageError(
                    f"{self.architecture.name} has no module of class {name}",
                    details=list(known),
                    why="its parameters would stay in the root's unit; these are the classes of the model",
                    next_step=f"{flags.wrap} with the class that the training job wraps",
                )
            wrapped.update(known[name])
        modules = module_paths(param.name for param in self.names.params)
        paths = [path for path in modules if template(path) in wrapped]
        return UnitPrefixes(("", *paths), complete=True, label=wrap_text(classes), exact=True)


def wrap_text(classes: Sequence[str]) -> str:
    """The options for ``classes``, for a message."""
    return " ".join(f"{flags.wrap(name)}" for name in classes)


def require_classes(base: BaseModel, classes: Sequence[str]) -> None:
    """Raises NeedsInformationError if no class is named."""
    if not classes:
        raise NeedsInformationError(
            "a model does not say which of its modules are wrapped",
            why="each wrapped module has its own flat parameter, and wrapping is never guessed",
            next_step=f"add {wrap_text(base.architecture.layers)} if each of its layers is wrapped, or "
            f"{flags.wrap('none')} for the root only",
        )


@cache
def known_architectures() -> Mapping[str, Sequence[Architecture]]:
    """The architectures of ``architectures.json`` by name, the newest first: most have one for all versions."""
    from importlib import resources

    text = resources.files("fsdpckpt.flat.units").joinpath("architectures.json").read_text(encoding="utf-8")
    document = json.loads(text)
    found: dict[str, list[Architecture]] = {}
    for entries in (document["architectures"], document["older"]):
        for name, entry in entries.items():
            found.setdefault(name, []).append(_of_entry(name, entry))
    return found


def _of_entry(name: str, entry: Mapping[str, Any]) -> Architecture:
    listed: list[str] = entry["parameters"]
    return Architecture(
        name=name,
        parameters=tuple(each.removesuffix("?") for each in listed),
        optional=frozenset(each.removesuffix("?") for each in listed if each.endswith("?")),
        kinds=tuple(map(frozenset, entry.get("kinds", ()))),
        buffers=frozenset(entry.get("buffers", ())),
        stored=entry.get("stored", ""),
        modules=entry["modules"],
        layers=tuple(entry["layers"]),
        tied=entry["tied"],
        tied_by_default=entry["tied_by_default"],
        since=entry.get("since"),
        before=entry.get("before"),
    )


def base_model(directory: str, sources: Sources, version: str | None = None) -> BaseModel:
    """The model whose ``config.json`` and weights are in ``directory``. ``version``: of the job's transformers.

    Raises SourceError if they cannot be read or contradict each other, NeedsInformationError if the order of its
    parameters is not known.
    """
    path = f"{directory.rstrip('/')}/{CONFIG}"
    fields = config_fields(path, sources)
    if not fields:
        raise SourceMissingError(
            f"{flags.config(directory)} has no {CONFIG}",
            file=path,
            expected=f"the directory of a Hugging Face model: {CONFIG} and its safetensors files",
            next_step="give the directory that the training started from",
        )
    _refuse_quantized(fields, path, directory)
    architecture = _architecture(fields, path, version)
    checkpoint = open_checkpoint(directory, sources=sources, locate=Locate.NOTHING)
    stored = model_names(checkpoint, directory)
    if stored is None:
        raise SourceMissingError(
            f"{flags.config(directory)} has no weights, whose headers say the shapes of the parameters",
            file=directory,
            next_step="give the directory that the training started from",
        )
    in_files = {param.name: param.shape for param in stored.params}
    wrong = [f"{each.field} is {each.stated}, and {each.what} {each.found}" for each in disagreements(fields, in_files)]
    built = _as_built(architecture, checkpoint, stored, directory)
    params = [param for param in built.params if template(param.name) not in architecture.buffers]
    shapes = {param.name: param.shape for param in params}
    tied = fields.get("tie_word_embeddings", architecture.tied_by_default) is not False
    shared = tuple(architecture.tied.items()) if tied else ()
    wrong += _differences(architecture, shapes, {later for later, _ in shared})
    wrong += _uneven({name: shape for name, shape in shapes.items() if name not in in_files})
    if wrong:
        raise SourceUnsupportedError(
            f"the weights in {directory} are not those of the {architecture.name} that {path} describes",
            details=wrong,
            most_shown=_MOST_NAMES,
            file=path,
            why="the weights were saved by other code than transformers', or belong to another model",
            next_step=_INSTEAD,
        )
    by_name = {param.name: param for param in params}
    ordered = architecture.in_order(name for name in by_name if name not in dict(shared))
    return BaseModel(
        architecture,
        Listing(
            tuple(_trained(by_name[name]) for name in ordered),
            ordered=True,
            source=f"{directory}, in the order of {architecture.name}",
            shared=shared,
            from_reference=True,
        ),
    )


def _refuse_quantized(fields: Mapping[str, object], path: str, directory: str) -> None:
    """Raises SourceUnsupportedError if ``config.json`` says that the weights are quantized."""
    settings = fields.get("quantization_config")
    if not settings:
        return
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    raise SourceUnsupportedError(
        f"the weights in {directory} are quantized",
        expected="no quantization_config",
        found=f"quant_method {method}" if method else "a quantization_config",
        file=path,
        key="quantization_config",
        why="FSDP1 trains float parameters: the job dequantized these weights, or added adapters to them, and the "
        "parameters that it trained are not the tensors of these files",
        next_step="give a directory with the weights as the job trained them (if these are, remove quantization_config "
        f"from config.json); or {_INSTEAD}",
    )


def _as_built(architecture: Architecture, checkpoint: Checkpoint, stored: Listing, directory: str) -> Listing:
    """``stored``, the names and shapes in weight files, as the model has them: transformers 5 fuses experts.

    Files that do not fit the map stay as they are, and are refused for their names.
    """
    known = {*architecture.parameters, *architecture.buffers}
    if not architecture.stored or all(template(param.name) in known for param in stored.params):
        return stored
    from fsdpckpt.maps import Reading, apply_map, named_map

    def unread(*_: object) -> NoReturn:
        raise InternalError(f"the map {architecture.stored} reads values")

    shapes = {param.name: param.shape for param in stored.params}
    try:
        weights = replace(checkpoint, optim=None)
        built, _ = apply_map(weights, named_map(architecture.stored), {}, Reading(unread, unread), shapes)
    except UsageError:
        return stored
    return model_names(built, directory) or stored


def _trained(param: Parameter) -> Parameter:
    """``param``, which is known to be a parameter."""
    return replace(param, sharded=bool(param.shape))


class _VersionNeeded(NeedsInformationError):
    """``layers``: of any version: the classes that are usually wrapped."""

    layers: tuple[str, ...] = ()


def _architecture(fields: Mapping[str, object], path: str, version: str | None) -> Architecture:
    named = fields.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    known = known_architectures()
    if len(names) != 1 or names[0] not in known:
        raise NeedsInformationError(
            f"the order of the parameters of {', '.join(names) or 'this model'} is not known",
            details=sorted(known),
            file=path,
            why="flat parameters follow model.parameters(), and weight files sort their names; fsdpckpt knows the "
            "order of these architectures only",
            next_step=_INSTEAD,
        )
    (name,) = names
    revisions = known[name]
    if version is None and (len(revisions) > 1 or revisions[0].before is not None):
        # The version in config.json is that of the program that saved the base model, and not the job's.
        needed = _VersionNeeded(
            f"the parameters of {name} have another order or other names in other versions of transformers",
            details=[f"known for {each.versions}" for each in revisions],
            file=path,
            next_step=f"add {flags.transformers_version('VERSION')} of the training job",
        )
        needed.layers = revisions[0].layers
        raise needed
    if version is None or (len(revisions) == 1 and revisions[0].since is revisions[0].before is None):
        return revisions[0]
    for each in revisions:
        if each.is_of(version):
            return each
    raise SourceUnsupportedError(
        f"the parameters of {name} in transformers {version} are not those of its weight files",
        expected=" or ".join(each.versions for each in revisions),
        found=version,
        file=path,
        why="this version of transformers builds the model with other parameters",
        next_step=_INSTEAD,
    )


def _differences(
    architecture: Architecture, shapes: Mapping[str, tuple[int, ...]], left_out: Iterable[str]
) -> Iterator[str]:
    """The names in which the weights differ from ``architecture``; every layer must have the same ones.

    ``left_out``: parameters that the file need not have.
    """
    found: dict[str, set[tuple[str, ...]]] = {}
    members: dict[str, set[tuple[str, ...]]] = {}  # of each list of modules: the numbers that lead to its members
    for name in shapes:
        numbers = tuple(_NUMBER.findall(name))
        found.setdefault(template(name), set()).add(numbers)
        for depth, path in enumerate(_lists_of(template(name)), 1):
            members.setdefault(path, set()).add(numbers[:depth])
    of_kinds = {name: found.pop(name, set()) for name in frozenset().union(*architecture.kinds)}
    yield from _differences_of_layers(architecture, of_kinds, members)
    for parameter in architecture.parameters:
        if parameter in of_kinds:
            continue
        present = found.pop(parameter, set())
        optional = parameter in architecture.optional or parameter in left_out
        lists = list(_lists_of(parameter))
        everywhere = members.get(lists[-1], set()) if lists else {()}
        for numbers in sorted(everywhere - present if present or not optional else ()):
            yield f"there is no {parameter.format(*numbers)}"
    for path, of_list in members.items():  # experts: each layer has as many
        lengths = {numbers[:-1]: 0 for numbers in of_list}
        for numbers in of_list:
            lengths[numbers[:-1]] += 1
        for above, length in lengths.items():
            if length < max(lengths.values()):
                most = max(lengths.values())
                yield f"{path.format(*above, '*')} has {length} modules, and other layers have {most}"
    for unknown in found:
        yield f"{architecture.name} has no parameter {unknown.replace('{}', '*')}"


def _uneven(made: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """The parameters that a map made of fewer experts than in other layers."""
    most: dict[str, int] = {}
    for name, shape in made.items():
        most[template(name)] = max(most.get(template(name), 0), shape[0])
    for name, shape in made.items():
        if shape[0] < most[template(name)]:
            yield f"{name} would be made of {shape[0]} experts, and those of other layers of {most[template(name)]}"


def _differences_of_layers(
    architecture: Architecture,
    found: Mapping[str, set[tuple[str, ...]]],
    members: Mapping[str, set[tuple[str, ...]]],
) -> Iterator[str]:
    """What layers lack that are of no kind, or have of two kinds. ``found``: the layers that have each parameter."""
    lists = {path for name in found for path in _lists_of(name)}
    for layer in sorted({numbers for path in lists for numbers in members.get(path, ())}):
        names = {name for name, layers in found.items() if layer in layers}
        nearest = max(architecture.kinds, key=lambda kind: len(kind & names))
        yield from (f"there is no {name.format(*layer)}" for name in sorted(nearest - names))
        yield from (f"{name.format(*layer)} belongs to another kind of layer" for name in sorted(names - nearest))


def _lists_of(name: str) -> Iterator[str]:
    """The paths in ``name``, a template, that end with the number of a module in its list."""
    words = name.split("{}")
    for depth in range(1, len(words)):
        yield "{}".join(words[:depth]) + "{}"


def units_command(reference: str | None, source: str | None, sources: Sources) -> str | None:
    """The command that makes the units file of ``source`` from the base model in ``reference``.

    None if that is not the directory of a model whose order is known.
    """
    if reference is None:
        return None
    directory = (
        reference if sources.stat(f"{reference.rstrip('/')}/{CONFIG}") is not None else os.path.dirname(reference)
    )
    version: list[Wording] = []
    try:
        layers = base_model(directory or ".", sources).architecture.layers
    except _VersionNeeded as error:
        layers, version = error.layers, [flags.transformers_version("VERSION")]
    except FsdpckptError:
        return None
    words = [flags.config(directory or "."), *map(flags.wrap, layers), *version]
    if source is not None:
        words.append(flags.from_(source))
    return flags.command("units", *words, "-o", "units.json")
