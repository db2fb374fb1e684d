"""Hugging Face's weights: ``model-0000i-of-0000N.safetensors`` with their index, no optimizer."""

from __future__ import annotations

from fsdpckpt.ir.checkpoint import Container, Layout
from fsdpckpt.producers.forms import Flavor, Form, Place, Sign

__all__ = ["HUGGINGFACE"]

HUGGINGFACE = Flavor(
    name="huggingface",
    title="Hugging Face's weights",
    signs=(Sign((r"^model([-.].*)?\.safetensors(\.index\.json)?$", r"^config\.json$")),),
    forms=(Form(Layout.FULL, Container.SAFETENSORS, Place("model"), None, weights=True),),
    state=r"\.safetensors(\.index\.json)?$",
    model_files="",
)
