"""Draws a checkpoint, or what two have in common, as one HTML page."""

from fsdpckpt.report.write import (
    MARK,
    check_diff_report,
    check_report,
    write_diff_report,
    write_incomplete_report,
    write_report,
)

__all__ = [
    "MARK",
    "check_diff_report",
    "check_report",
    "write_diff_report",
    "write_incomplete_report",
    "write_report",
]
