"""How a checkpoint with an optimizer lies in safetensors files: one text that the writer and the reader follow.

A safetensors file holds named tensors and string-to-string metadata, nothing else. What a checkpoint has beyond
that is one JSON document under ``METADATA_KEY`` of ``__metadata__``, beside ``"format": "pt"``. When one group of
shards carries it, it stands in the first shard only (any shard is accepted when reading); several documents in
one group are joined entry by entry. Files without it are plain weights: a model section and nothing more.

Tensor keys
    directory form: two groups of files, read separately,
        ``model.safetensors`` or ``model-0000i-of-0000N.safetensors`` with ``model.safetensors.index.json``,
            key = the model FQN itself;
        ``optimizer.safetensors`` or ``optimizer-0000i-of-0000N.safetensors`` with ``optimizer.safetensors.index.json``,
            key = ``state.<param>.<state>``.
    one file that holds one section only: the same keys as in the directory form.
    one file that holds both: ``"sections": true``, keys ``model.<fqn>`` and ``optimizer.state.<param>.<state>``.
    a tensor inside extras or param groups: any key (the writer uses ``extra.<path>``, ``optimizer.<path>``), found
    through the ``{"$tensor": key}`` that stands in its place in the encoded value.

The document (every entry but ``version`` may be absent)
    ``version``          1
    ``sections``         true when both sections share one file, see above
    ``model_aliases``    {alias: key}: tied weights, stored once under ``key`` (a model FQN)
    ``model_order``      [fqn, ...]: every model entry in the source's order, aliases and values included
    ``model_values``     encoded {fqn: value}: model entries that are no tensor (``_extra_state``)
    ``model_metadata``   encoded ``_metadata`` of the state dict
    ``optim``            {
        ``key_type``     "id" or "name": the type of the parameter keys
        ``param_keys``   [[key, ...], ...]: the keys of each param group
        ``order``        encoded [[param, [state name, ...]], ...]: every state in the source's order
        ``state_values`` encoded {param: {state: value}}: states that are no tensor
        ``param_groups`` encoded list of groups, null when the source has none
        ``extra``        encoded: top-level entries beside ``state`` and ``param_groups``
    }
    ``extra``            encoded extras under the source's own keys
    ``raw``              {tensor key: [torch dtype name, [shape]]}: dtypes safetensors has no code for, stored as
                         ``U8`` with shape ``[nbytes]``

"encoded" means ``containers.values_json.encode``; its ``$tensor`` names are safetensors keys as stored.
"""

from __future__ import annotations

__all__ = ["METADATA_KEY", "VERSION", "model_key", "state_key"]

METADATA_KEY = "fsdpckpt"
VERSION = 1


def model_key(fqn: str, *, sections: bool) -> str:
    """The safetensors key of a model entry."""
    return f"model.{fqn}" if sections else fqn


def state_key(param: int | str, state: str, *, sections: bool) -> str:
    """The safetensors key of one optimizer state of one parameter."""
    return f"optimizer.state.{param}.{state}" if sections else f"state.{param}.{state}"
