"""One conversion: read, transform, lay out, plan, execute, verify, publish, report."""

from fsdpckpt.converters.report import PlannedFile, Report

__all__ = ["PlannedFile", "Report"]
