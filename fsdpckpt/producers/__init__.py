"""The frameworks that save checkpoints: where each puts what."""

from fsdpckpt.producers.flavors import (
    EXTRA_STEM,
    PLAIN,
    PLAIN_MESH,
    PLAIN_PATHS,
    Flavor,
    Form,
    MeshForm,
    PathKey,
    RankFileName,
    SectionPath,
    Signature,
    extra_keys,
)

__all__ = [
    "EXTRA_STEM",
    "Flavor",
    "Form",
    "MeshForm",
    "PLAIN",
    "PLAIN_MESH",
    "PLAIN_PATHS",
    "PathKey",
    "RankFileName",
    "SectionPath",
    "Signature",
    "extra_keys",
]
