"""Units: built from names and settings, proposed from slices, proved."""

from fsdpckpt.flat.units.build import Settings, any_module, build_units, keyed_groups, module_pattern, regrouped

__all__ = ["Settings", "any_module", "build_units", "keyed_groups", "module_pattern", "regrouped"]
