"""The numbers of a model that a map leaves open, such as the size of a head."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from fsdpckpt import flags
from fsdpckpt.converters.target.decision import MapDecision
from fsdpckpt.converters.target.model_files import configuration_in, folders_of
from fsdpckpt.errors import NeedsInformationError, UsageError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.model_config import CONFIG
from fsdpckpt.options import ConvertOptions
from fsdpckpt.storage.sources import Sources

if TYPE_CHECKING:  # few conversions need maps
    from fsdpckpt.maps import LayoutMap


class MapNumbers(Mapping[str, int]):
    """The numbers that a map leaves open: given, of a ``config.json``, or what the map itself states.

    Asking for one that nothing gives raises NeedsInformationError: a rule that is not used needs none.
    """

    def __init__(self, layout_map: LayoutMap, opened: Checkpoint, mapping: MapDecision, sources: Sources) -> None:
        self._map, self._source = layout_map, opened.source
        options = mapping.options
        # Of several maps each takes its own.
        given = ((name, text) for name, text in options.map_value if name in layout_map.values)
        self._given = {name: _given_number(name, text) for name, text in given}
        folders = [*folders_of(opened, options), *mapping.folders]
        configuration = configuration_in(folders, sources) if layout_map.values else {}
        self._fields = {name: value for name, value in configuration.items() if type(value) is int and value > 0}
        for name, number in self._given.items():
            stated = self._stated(name)
            if stated not in (None, number):
                raise UsageError(
                    f"{flags.map_value(f'{name}={number}')} contradicts {CONFIG}",
                    expected=str(stated),
                    found=str(number),
                    why=f"{CONFIG} describes the model, and says {stated}",
                    next_step=f"drop {flags.map_value}, or correct {CONFIG}",
                )

    def __getitem__(self, name: str) -> int:
        stated = self._stated(name)
        number = self._given.get(name, stated if stated is not None else self._map.values[name].default)
        if number is None:
            fields = " or ".join(size.text for size in self._map.values[name].fields)
            raise NeedsInformationError(
                f"{self._map.name} needs {name}, which is unknown",
                why=f"no {CONFIG} beside {self._source} has {fields}" if fields else None,
                next_step=f"add {flags.map_value(f'{name}=N')}, or {flags.reference('DIR')} of a directory with the "
                f"model's {CONFIG}",
            )
        return number

    def __iter__(self) -> Iterator[str]:
        return iter(self._map.values)

    def __len__(self) -> int:
        return len(self._map.values)

    def _stated(self, name: str) -> int | None:
        """What ``config.json`` says; a division that leaves a rest says nothing."""
        for size in self._map.values[name].fields:
            if all(field in self._fields for field in size.names):
                with suppress(ValueError):
                    return size.value(self._fields)
        return None


def refuse_unknown_numbers(maps: Sequence[LayoutMap], options: ConvertOptions) -> None:
    """Raises UsageError for a number that is given and that none of ``maps`` has."""
    known = list(dict.fromkeys(name for layout_map in maps for name in layout_map.values))
    for name, text in options.map_value:
        if name not in known:
            given = flags.map_value(f"{name}={text}")
            have = "has" if len(maps) == 1 else "have"
            raise UsageError(
                f"{given}: {' and '.join(each.name for each in maps)} {have} no value {name}",
                expected=", ".join(known) or "none",
                found=name,
                next_step=f"drop {flags.map_value}",
            )


def _given_number(name: str, text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d{0,8}", text, re.ASCII):
        raise UsageError(
            f"{flags.map_value(f'{name}={text}')} is not a whole number of at least 1",
            found=text,
            next_step=f"{flags.map_value(f'{name}=N')} with the number of the model",
        )
    return int(text)
