"""What every worker process of the oracle does first: limit its time, dump stacks when it hangs, silence warnings."""

from __future__ import annotations

import faulthandler
import logging
import warnings

import torch

__all__ = ["quiet_worker"]


def quiet_worker(*, limit: float) -> None:
    """Dump all stacks and exit after ``limit`` seconds; one thread; no deprecation warnings from torch."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit, exit=True)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
