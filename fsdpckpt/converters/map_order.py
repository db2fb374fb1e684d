"""Which of the two models of a map the options about names describe, and the ids of the new one.

``--parameters`` and ``--reference`` each describe the model whose names they have. The order of the source's groups
says nothing of the new model's: a map joins and divides its parameters, and another module may list them in another
order. So ids are made only where one of both options names the parameters of the new model.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from fsdpckpt import flags
from fsdpckpt.converters.steps.knowledge import Knowledge
from fsdpckpt.errors import NeedsInformationError
from fsdpckpt.ir.checkpoint import Checkpoint
from fsdpckpt.ir.names import clean
from fsdpckpt.ir.optimizer import PARAM_NAMES, Optimizer
from fsdpckpt.ir.table import Table, names_of
from fsdpckpt.options import ConvertOptions
from fsdpckpt.transform.parameter_order import ParameterOrder
from fsdpckpt.transform.stated_orders import parameter_orders

if TYPE_CHECKING:  # few conversions need maps
    from fsdpckpt.maps import LayoutMap


def divided(
    given: Knowledge, opened: Checkpoint, maps: Sequence[LayoutMap], options: ConvertOptions
) -> tuple[ConvertOptions, Knowledge]:
    """``options`` with those that describe the source ``opened`` alone, and what those of the new model say."""
    own = set(map(clean, names_of(opened)))

    def is_new(names: Sequence[str]) -> bool:
        foreign = [each for each in names if clean(each) not in own] if own else []
        return any(layout_map.makes(each) for each in foreign for layout_map in maps)

    of_new = replace(given.request, file=None, globs=())  # units are those of the source
    if is_new(_listed(given)):
        options = replace(options, parameters=None)
    else:
        of_new = replace(of_new, parameters=None, parameter_groups=())
    if is_new(_names_of_reference(given)):
        options = replace(options, reference=None)
    else:
        of_new = replace(of_new, reference=None)
    return options, given.of(of_new)


def _listed(given: Knowledge) -> Sequence[str]:
    return given.request.parameters or ()


def _names_of_reference(given: Knowledge) -> Sequence[str]:
    if given.reference_is_unreadable:
        return ()
    return names_of(given.reference) if given.reference is not None else ()


def _names_all(given: Knowledge, checkpoint: Checkpoint) -> bool:
    """Whether an option names every parameter that the optimizer of ``checkpoint`` trains."""
    optim = checkpoint.optim
    trained = {clean(str(key)) for key in optim.all_keys()} if optim is not None else set[str]()
    return any(trained <= set(map(clean, names)) for names in (_listed(given), _names_of_reference(given)))


def in_order_of_ids(
    checkpoint: Checkpoint, given: Knowledge, of_new_model: Knowledge, maps: Sequence[str]
) -> tuple[Checkpoint, Knowledge]:
    """``checkpoint``, that of the new model, with its groups in the order that ``of_new_model`` states, and who knows.

    ``given``: what options say of either model: of both, where ``maps`` change no name. Raises NeedsInformationError if
    nothing states the order.
    """
    ordered = _in_stated_order(of_new_model, checkpoint)
    if ordered is None and _names_all(given, checkpoint):
        of_new_model = given.of(replace(given.request, file=None, globs=()))
        ordered = _in_stated_order(of_new_model, checkpoint)
    if ordered is None and checkpoint.optim is not None and checkpoint.optim.keys:
        raise _unknown_order(checkpoint, maps)
    return ordered or checkpoint, of_new_model


def _in_stated_order(given: Knowledge, checkpoint: Checkpoint) -> Checkpoint | None:
    """``checkpoint``, whose optimizer is keyed by name, with its groups in the order that the options state; None if
    they state none.
    """
    table = Table.of(checkpoint)
    order = _stated_order(given, checkpoint)
    if order is None or table.optimizer is None:
        return None
    if table.optimizer.groups is None:
        return checkpoint  # a list of all parameters counts them
    in_order = chain(*order.groups) if order.groups is not None else order.names
    position = {name: at for at, name in enumerate(in_order)}
    # The groups are those of the source, and the new model may divide its parameters otherwise: one order for all.
    listing = [group for group in table.optimizer.groups if group.members is not None]
    return table.sorted_by([position] * len(listing)).written(checkpoint)


def _stated_order(given: Knowledge, checkpoint: Checkpoint) -> ParameterOrder | None:
    without_words = replace(checkpoint, optim=_without_words(checkpoint.optim))
    orders = parameter_orders(without_words, given.given_names(units=None))
    return next((order for order in orders if order.ordered), None)  # that of the mapped model is not


def _without_words(optim: Optimizer | None) -> Optimizer | None:
    """``optim`` without ``param_names``, which are in the order of the source's optimizer."""
    if optim is None or optim.groups is None:
        return optim
    plain = tuple(group.with_setting(PARAM_NAMES, None) if group.words() else group for group in optim.groups)
    return replace(optim, groups=plain)


def _unknown_order(checkpoint: Checkpoint, maps: Sequence[str]) -> NeedsInformationError:
    """The error for ids of a model whose order nothing states."""
    named = " ".join(f"{flags.map_(name)}" for name in maps)
    make = "makes" if len(maps) == 1 else "make"
    return NeedsInformationError(
        f"{named} {make} other parameters, and the order in which the optimizer of the new model lists them is unknown",
        why=f"the optimizer of {shlex.quote(checkpoint.source)} is keyed by id, and an id is a position in that list",
        next_step=f"{flags.key_type('name')}, or add {flags.parameters('FILE')} (the names of the new model's "
        f"parameters, in the order of its optimizer, one per line) or {flags.reference('PATH')} of a torch or DCP "
        "checkpoint of the new model",
    )
