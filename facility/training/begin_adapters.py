"""The adapters of a rank, filled from the received model or begun from the federation's seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from facility.exchange.checkpoints.adapters import PREFIX, is_adapter, is_added, is_factor, is_magnitude
from facility.exchange.checkpoints.begun_adapters import begun_factor
from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.errors import InputError
from facility.training import dora
from facility.training.model import Names
from facility.training.shards import LocalShard, load_shards


@torch.no_grad()
def load_adapters(
    parts: Sequence[LocalShard],
    received: Checkpoint,
    base: Checkpoint,
    names: Names,
    seed: int,
) -> str:
    """Fill the adapters from the received model, or begin them: A uniform as peft does, B zero, magnitudes as the rows
    of the base, what is saved whole as in the base; says which.

    A beginning is drawn from the federation's seed and the name: every facility begins with the same.
    """
    adapters = [part for part in parts if part.name.startswith(PREFIX)]
    saved = [part for part in adapters if not is_added(part.name)]
    whole = sorted({part.name.removeprefix(PREFIX).rpartition(".")[0] for part in saved})
    note = f"; trained whole: {', '.join(whole)}" if whole else ""
    if all(part.name in received.tensors for part in adapters):
        load_shards(adapters, received)
        return f"{len(adapters)} adapter tensors received{note}"
    if lacking := [part.name for part in adapters if part.name not in received.tensors]:
        if any(map(is_adapter, received.tensors)):
            raise InputError(
                f"{received.directory} holds adapters, but none for {lacking[0]!r} ({len(lacking)} of {len(adapters)} "
                "are missing), which training.lora asks for: name the targets and modules_to_save of those"
            )
    load_shards([dataclasses.replace(part, name=names.saved[part.name]) for part in saved], base, names.conversion)
    for part in adapters:
        if is_magnitude(part.name):
            dora.begin(part, names.magnitudes[part.name], base, names.conversion)
        if not is_factor(part.name):
            continue
        drawn = torch.from_numpy(begun_factor(seed, part.name, part.shape))
        part.tensor.copy_(drawn[part.first : part.first + part.tensor.shape[0]])
    return f"{len(adapters)} adapter tensors begun from the federation's seed{note}"
