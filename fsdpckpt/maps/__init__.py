"""Layout maps: rules that say which parameters of one model are which of another, and move their states with them."""

from fsdpckpt.maps.apply import AppliedMap, apply_map
from fsdpckpt.maps.catalog import map_names, named_map
from fsdpckpt.maps.parse import parse_map, read_map
from fsdpckpt.maps.rules import LayoutMap
from fsdpckpt.maps.work import Reading

__all__ = ["AppliedMap", "LayoutMap", "Reading", "apply_map", "map_names", "named_map", "parse_map", "read_map"]
