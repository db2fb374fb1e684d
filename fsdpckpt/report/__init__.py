"""Draws a checkpoint as one HTML page."""

from fsdpckpt.report.write import MARK, check_report, write_report

__all__ = ["MARK", "check_report", "write_report"]
