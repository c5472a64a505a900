"""FSDP2 over the shards of a model: every block a unit; embedding, head and blocks that share weights in the root's."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard


def shard_model(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reshard: bool,
    offload: bool = False,
    root_output: torch.dtype | None = torch.float32,
) -> None:
    """Apply `fully_shard` in place. `reshard`: free a block's weights between forward and backward."""
    policy: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
    if empty := {parameter for parameter in root.parameters() if not parameter.numel()}:
        policy["ignored_params"] = empty  # whose gradients torch cannot put together
    at_root = dict(policy)
    if compute_dtype != torch.float32:
        # Only the root's output is float32: a block's would not fit the half-precision head.
        policy["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        at_root["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=compute_dtype, reduce_dtype=torch.float32, output_dtype=root_output
        )
    # Of outputs that are views, as of a head with a bias: nothing here or in a model writes into its output afterwards.
    warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
    for block in without_shared(list(blocks)):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, **policy)
    fully_shard(root, mesh=mesh, reshard_after_forward=False, **at_root)


def without_shared(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The blocks that share no parameter with another; those that do, as in Zamba, stay in the root's unit.

    FSDP2 lets one unit alone manage a parameter.
    """
    holders = Counter(parameter for block in blocks for parameter in set(block.parameters()))
    return [block for block in blocks if all(holders[parameter] == 1 for parameter in block.parameters())]


def drop_gathered(modules: Iterable[nn.Module]) -> None:
    """Free the parameters that FSDP2 keeps gathered after a forward pass without backward: they become stale."""
    for root in modules:
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
