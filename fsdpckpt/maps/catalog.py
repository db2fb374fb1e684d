"""The maps that come with fsdpckpt: one file each in ``named``, whose name is the map's."""

from __future__ import annotations

from importlib.resources import files

from fsdpckpt.maps.parse import parse_map
from fsdpckpt.maps.rules import LayoutMap

_SUFFIX = ".toml"


def map_names() -> list[str]:
    """The names of all built-in maps."""
    folder = files("fsdpckpt.maps") / "named"
    return sorted(each.name.removesuffix(_SUFFIX) for each in folder.iterdir() if each.name.endswith(_SUFFIX))


def named_map(name: str) -> LayoutMap:
    """The built-in map ``name``, which is one of ``map_names``."""
    data = (files("fsdpckpt.maps") / "named" / f"{name}{_SUFFIX}").read_bytes()
    return parse_map(data, name)
