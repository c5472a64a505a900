"""The adapters of a rank, filled from the received model or begun from the federation's seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from facility.exchange.checkpoints.adapters import (
    CONFIG,
    PREFIX,
    is_adapter,
    is_added,
    is_factor,
    is_magnitude,
    read_adapter_config,
)
from facility.exchange.checkpoints.begun_adapters import begun_factor
from facility.exchange.checkpoints.checkpoint import Checkpoint
from facility.exchange.errors import InputError
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.strict_json import Fields
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
    *,
    trained: Collection[str],
) -> str:
    """Fill the adapters from the received model, or begin them: A uniform as peft does, B zero, magnitudes as the rows
    of the base, what is saved whole as in the base; says which.

    A beginning is drawn from the federation's seed and the name: every facility begins with the same. `trained`: names
    of all adapter tensors, on any rank. Raises `InputError` where the received model holds others.
    """
    adapters = [part for part in parts if part.name.startswith(PREFIX)]
    saved = [part for part in adapters if not is_added(part.name)]
    whole = sorted({part.name.removeprefix(PREFIX).rpartition(".")[0] for part in saved})
    note = f"; trained whole: {', '.join(whole)}" if whole else ""
    if surplus := sorted(name for name in received.tensors if is_adapter(name) and name not in trained):
        raise InputError(
            f"{received.directory} holds adapters, and {surplus[0]!r} ({len(surplus)} in all) is none that "
            "training.lora asks for, so another model would be trained: name the targets and modules_to_save of those, "
            "and dora"
        )
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
            dora.initialise_magnitudes(part, names.magnitudes[part.name], base, names.conversion)
        if not is_factor(part.name):
            continue
        drawn = torch.from_numpy(begun_factor(seed, part.name, part.shape))
        part.tensor.copy_(drawn[part.first : part.first + part.tensor.shape[0]])
    return f"{len(adapters)} adapter tensors begun from the federation's seed{note}"


def check_scale(received: Path, settings: LoraSettings) -> None:
    """Raise `InputError` where the adapters that a federation begins with had another scale than they would have here.

    Those that state none are taken as they are. A later change of it was reported, and accepted (`crossfed run`).
    """
    if not (received / CONFIG).is_file():
        return
    fields = Fields(raw=read_adapter_config(received), where=str(received / CONFIG))
    alpha, rslora = fields.number("lora_alpha", settings.alpha), fields.raw.get("use_rslora") is True
    if fields.whole("r", settings.rank, least=1) != settings.rank:
        return  # the shapes show it
    was, now = _scale(alpha, settings.rank, rslora), _scale(settings.alpha, settings.rank, settings.rslora)
    if not math.isclose(was, now, rel_tol=1e-6):
        raise InputError(
            f"{received} holds adapters of alpha {alpha:g}{' with rslora' if rslora else ''}, and training.lora.alpha "
            f"is {settings.alpha:g}{' with rslora' if settings.rslora else ''}, so that another model would be "
            f"trained: what they add is multiplied by {was:.3g} there and by {now:.3g} here; set both as they were"
        )


def _scale(alpha: float, rank: int, rslora: bool) -> float:
    """What B A is multiplied by."""
    return alpha / (math.sqrt(rank) if rslora else rank)
