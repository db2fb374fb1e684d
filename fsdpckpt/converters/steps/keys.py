"""Keys of the optimizer: by name where a later step needs names, and at the end as asked for."""

from __future__ import annotations

from dataclasses import replace

from fsdpckpt import flags
from fsdpckpt.converters.steps.draft import Draft
from fsdpckpt.converters.target.decision import Decision
from fsdpckpt.errors import FsdpckptError, NeedsInformationError
from fsdpckpt.ir import IdRule, Layout
from fsdpckpt.ir.checkpoint import Checkpoint, KeyType
from fsdpckpt.ir.units import Units
from fsdpckpt.producers.recognition import id_rule_of
from fsdpckpt.transform.order_sources import from_param_names
from fsdpckpt.transform.rekey import recounted


def name_optimizer(draft: Draft, decision: Decision) -> Draft:
    """Key the optimizer by name if anything that follows goes by names; else, early, as asked for."""
    by_name = decision.layout is Layout.FLATTENED or needs_names(draft, decision)
    return _keyed(draft, decision, "name" if by_name else decision.options.key_type)


def find_named_optimizer(draft: Draft) -> Draft | FsdpckptError:
    """``draft`` with its optimizer keyed by name; if nothing proves the names, the error that says what would."""
    optim = draft.checkpoint.optim
    if optim is None or optim.key_type != "id":
        return draft
    named = draft.knowledge.find_named_alone(_with_source_model(draft), draft.id_units)
    if isinstance(named, FsdpckptError):
        return named
    return draft.with_checkpoint(replace(named, model=draft.checkpoint.model))


def key_optimizer(draft: Draft, decision: Decision) -> Draft:
    """Key the optimizer as it is written: as asked for, else as the source does."""
    keyed = _keyed(draft, decision, decision.options.key_type or draft.source_keys)
    _require_common_ids(keyed.checkpoint, keyed.id_units, decision.layout)
    return keyed


def needs_names(draft: Draft, decision: Decision) -> bool:
    """Whether the optimizer has to be keyed by name on the way, whatever its keys are in the end."""
    options = decision.options
    if options.include or options.exclude or options.missing_state or options.placements or options.like:
        return True
    # Only names say which ids the target gives the parameters that the source has ids of. Places in the model get
    # the order of the optimizer from whoever knows it.
    request, optim = draft.knowledge.request, draft.opened.optim
    listed = optim is not None and from_param_names(optim) is not None
    knows_order = listed or any(each is not None for each in (request.file, request.reference, request.parameters))
    source, target = _id_rules(draft, decision)
    counts_otherwise = target is not source and (target is IdRule.MODEL or knows_order)
    return draft.source_keys == "id" and options.key_type != "name" and counts_otherwise


def _keyed(draft: Draft, decision: Decision, key_type: KeyType | None) -> Draft:
    """Rekey the optimizer to ``key_type``; None keeps the keys. Ids are counted as the target counts them."""
    checkpoint = draft.checkpoint
    optim = checkpoint.optim
    source, target = _id_rules(draft, decision)
    if optim is None or key_type is None or optim.key_type in (None, key_type):
        group_by_group = source is IdRule.MODEL and target is IdRule.GROUPS
        return draft.with_checkpoint(recounted(checkpoint) if group_by_group else checkpoint)
    keyed = draft.knowledge.keyed(_with_source_model(draft), key_type, draft.id_units, target)
    return draft.with_checkpoint(replace(keyed, model=checkpoint.model))


def _with_source_model(draft: Draft) -> Checkpoint:
    """The checkpoint of ``draft``. A model that is left out still says which parameter each id is."""
    checkpoint, source_model = draft.checkpoint, draft.opened.model
    left_out = checkpoint.model is None and source_model is not None
    return replace(checkpoint, model=source_model) if left_out else checkpoint


def _id_rules(draft: Draft, decision: Decision) -> tuple[IdRule, IdRule]:
    """How the source and the target count ids."""
    return id_rule_of(draft.opened), decision.form.id_rule if decision.form is not None else IdRule.GROUPS


def _require_common_ids(checkpoint: Checkpoint, units: Units | None, layout: Layout) -> None:
    """Raises NeedsInformationError if the target has ids and its ranks number parameters differently.

    A full checkpoint has rank 0's ids, as ``FSDP.rekey_optim_state_dict`` gives them there.
    """
    optim = checkpoint.optim
    known = (optim.orders if optim is not None else ()) or (units.orders if units is not None else ())
    differing = [order for order in known if layout is Layout.SHARDED or 0 in order.ranks]
    if optim is not None and optim.key_type == "id" and differing:
        raise NeedsInformationError(
            f"the optimizers of the ranks of {checkpoint.source} list their parameters in different orders, so an id "
            "would be another parameter on each rank that loads the target",
            why="one optimizer state for all ranks can only be keyed by what all ranks agree on",
            next_step=f"{flags.key_type('name')}",
        )
