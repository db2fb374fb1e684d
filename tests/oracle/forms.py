"""Which forms ``tests.oracle.generate`` makes, and what is known about each; tables of tests are made from these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FORMS", "WORLDS", "Form", "form"]

WORLDS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Form:
    """One on-disk form. ``path`` is relative to a world size's directory, ``truth`` names the training run it shows.

    ``marked``: it says itself what FSDP shards (never at world size 1, except in FSDP1's full files); otherwise
    ``--buffers`` has to. ``grouped``: it keeps the optimizer's groups; a flattened optimizer has settings by parameter
    only. ``worlds``: the world sizes it is made for.
    """

    path: str
    truth: str
    layout: Literal["full", "sharded"]
    container: Literal["torch", "dcp"]
    keys: Literal["name", "id"] = "name"
    marked: bool = True
    grouped: bool = True
    worlds: tuple[int, ...] = WORLDS

    def needs_buffers(self, world: int) -> bool:
        return not self.marked or (world == 1 and self.layout == "sharded")


def _fsdp1(run: str, worlds: tuple[int, ...] = WORLDS) -> tuple[Form, ...]:
    return (
        Form(f"{run}_full.pt", run, "full", "torch", worlds=worlds),
        Form(f"{run}_ranks", run, "sharded", "torch", worlds=worlds),
        Form(f"{run}_dcp", run, "sharded", "dcp", worlds=worlds),
    )


def _fsdp2(run: str, worlds: tuple[int, ...] = WORLDS) -> tuple[Form, ...]:
    return (
        Form(f"{run}_full.pt", run, "full", "torch", marked=False, worlds=worlds),
        Form(f"{run}_full_ids.pt", run, "full", "torch", keys="id", marked=False, worlds=worlds),
        Form(f"{run}_ranks", run, "sharded", "torch", worlds=worlds),
        Form(f"{run}_ranks_ids", run, "sharded", "torch", keys="id", worlds=worlds),
        Form(f"{run}_dcp", run, "sharded", "dcp", worlds=worlds),
        Form(f"{run}_dcp_flattened", run, "sharded", "dcp", grouped=False, worlds=worlds),
        Form(f"{run}_dcp_ids", run, "sharded", "dcp", keys="id", worlds=worlds),
        Form(f"{run}_rich_ranks", f"{run}_rich", "sharded", "torch", worlds=worlds),
        Form(f"{run}_rich_dcp", f"{run}_rich", "sharded", "dcp", worlds=worlds),
    )


FORMS = (
    *_fsdp1("f1"),
    *_fsdp1("f1_flat"),
    *_fsdp1("f1_mesh"),
    *_fsdp2("f2"),
    *_fsdp1("h1", worlds=(4,)),
    *_fsdp1("h1_mesh", worlds=(4,)),
    *_fsdp2("h2", worlds=(4,)),
    Form("tp_ranks", "tp", "sharded", "torch", worlds=(4,)),
    Form("tp_dcp", "tp", "sharded", "dcp", worlds=(4,)),
)


def form(path: str) -> Form:
    """The form at ``path``."""
    return next(entry for entry in FORMS if entry.path == path)
