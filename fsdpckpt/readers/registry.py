"""Every reader, in the order in which they are asked: the first that claims a file reads it.

A new format is one subpackage and one line here.
"""

from __future__ import annotations

from fsdpckpt.readers.dcp import DcpReader
from fsdpckpt.readers.dcp.megatron import MegatronReader
from fsdpckpt.readers.deepspeed import DeepSpeedReader
from fsdpckpt.readers.protocol import Reader
from fsdpckpt.readers.safetensors import SafetensorsReader
from fsdpckpt.readers.torch_checkpointing import TorchCheckpointingReader
from fsdpckpt.readers.torch_ranks import TorchReader
from fsdpckpt.readers.torch_shards import TorchShardsReader

READERS: tuple[Reader, ...] = (
    MegatronReader(),
    DcpReader(),
    TorchCheckpointingReader(),
    SafetensorsReader(),
    DeepSpeedReader(),
    TorchShardsReader(),
    TorchReader(),
)
