"""``--help`` of ``convert``: its options under headings, and examples."""

from __future__ import annotations

from typing import ClassVar

from fsdpckpt.cli.groups import GroupedCommand

__all__ = ["EXAMPLES", "ConvertCommand"]

EXAMPLES = """\b
Examples:
  fsdpckpt convert runs/step-1000 full.pt
  fsdpckpt convert full.pt runs/resharded --to sharded --world-size 8
  fsdpckpt convert runs/step-1000 ranks --to sharded --container torch --world-size 3
  fsdpckpt convert runs/step-1000 ranks --to flattened --world-size 8 --units units.json
  fsdpckpt convert flat-ranks full.pt --unit 'layers.*' --reference model.pt --key-type name
  fsdpckpt convert runs/step-1000 weights --container safetensors --only model --dtype bfloat16
  fsdpckpt convert runs/step-1000 full.pt --dry-run
  fsdpckpt convert runs/step-1000 full.pt --resume
  fsdpckpt convert runs/step-1000 full.pt --nproc-per-node 4
  torchrun --nnodes 2 --nproc-per-node 8 ... -m fsdpckpt convert runs/step-1000 full.pt
"""


class ConvertCommand(GroupedCommand):
    """``--help`` of ``convert``."""

    groups: ClassVar = {
        "What is written": (
            "to",
            "container",
            "world_size",
            "tensor",
            "mesh_device",
            "key_type",
            "flavor",
            "max_shard_size",
        ),
        "What is taken, and its names": (
            *("only", "include", "exclude", "strip_prefix", "add_prefix", "rename", "dtype", "optim_dtype"),
            *("missing_state", "buffers"),
        ),
        "Units of FSDP1's flat parameters, and the order of parameters": (
            *("units", "unit", "use_orig_params", "strategy", "param_dtype", "shard_size", "reference", "parameters"),
        ),
        "Safety": ("dry_run", "verify", "overwrite", "resume"),
        "Resources": ("max_memory", "threads", "staging"),
        "Workers": (
            *("launcher", "nproc_per_node", "nnodes", "node_rank", "rdzv_endpoint", "device", "backend"),
            *("output_visibility", "fault_limit"),
        ),
        "Other options": ("as_json", "quiet", "help"),
    }
