"""An update written as a message straight from memory, without a whole one on disk that would be read again.

The bits are those of `facility.rounds.smaller`, which encodes an update that lies on disk: the same encoder reads
tensors that are in memory, rounded as they would be stored. It needs every tensor whole and by its own name, so that
shards of several ranks, and models whose parameters are stored in other pieces, are written whole first, as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from facility.exchange.checkpoints.checkpoint import FLOATS, Checkpoint, TensorEntry, open_checkpoint, torch_dtype
from facility.exchange.checkpoints.delta import write_tensors
from facility.exchange.checkpoints.delta_parts import HeldTensor
from facility.exchange.files.durable import new_directory
from facility.exchange.messages.settings import FacilitySettings
from facility.rounds.sealed import write_seal
from facility.training.request import RoundRequest
from facility.training.shards import LocalShard
from facility.training.state.save import Slot, round_to_export


def held_tensors(
    model: Path, slots: dict[str, Slot], parts: Sequence[LocalShard], settings: FacilitySettings
) -> tuple[Checkpoint, dict[str, TensorEntry]] | None:
    """The received tensors and those of the update by the same names; None where the update must be written whole.

    Adapters are, always.
    """
    if settings.training.lora.rank:
        return None
    received, held = open_checkpoint(model), held_whole(model, slots, parts)
    if held is None or held.keys() != received.tensors.keys():
        return None
    same = all(entry.shape == received.tensors[name].shape for name, entry in held.items())
    return (received, held) if same else None


def held_whole(model: Path, slots: dict[str, Slot], parts: Sequence[LocalShard]) -> dict[str, TensorEntry] | None:
    """Every tensor of the update, where this rank holds each whole and by its own name; else None."""
    by_name = {part.name: part for part in parts}
    if len(by_name) < len(parts) or by_name.keys() != slots.keys():
        return None
    for name, slot in slots.items():
        part = by_name[name]
        if not tuple(part.tensor.shape) == part.shape == slot.shape or not part.tensor.is_contiguous():
            return None
    return {name: held_tensor(by_name[name], slot, model) for name, slot in slots.items()}


def held_for_masks(model: Path, slots: dict[str, Slot], parts: Sequence[LocalShard]) -> Checkpoint | None:
    """The update as a checkpoint in memory; None where it must be written whole before it is masked.

    Only floating-point tensors are masked. New adapters differ from zero, and need not have been received.
    """
    held = held_whole(model, slots, parts) if all(slot.dtype in FLOATS for slot in slots.values()) else None
    return None if held is None else Checkpoint(directory=model, tensors=held, metadata={})


def held_tensor(part: LocalShard, slot: Slot, model: Path) -> HeldTensor:
    """A tensor that this rank holds whole, read as it would be stored in `slot`."""
    flat, dtype = part.tensor.detach().view(-1), torch_dtype(slot.dtype)

    def values(begin: int, count: int) -> memoryview:
        piece = round_to_export(part.name, flat[begin : begin + count], dtype).cpu().contiguous()
        return memoryview(piece.view(torch.uint8).numpy().data)

    return HeldTensor(
        name=part.name,
        file=model / slot.file,
        dtype=slot.dtype,
        shape=slot.shape,
        start=0,
        size=slot.size,
        values=values,
    )


def write_message(
    directory: Path, received: Checkpoint, held: dict[str, TensorEntry], request: RoundRequest
) -> dict[str, str]:
    """Write the message's tensors to `directory`, and what it leaves out to the request's `unsent_out`, sealed.

    Returns the sha256 of the files.
    """
    assert request.unsent_out is not None
    training = request.settings.training
    with new_directory(request.unsent_out) as kept:
        done = write_tensors(
            directory,
            kept,
            old=received,
            new=held,
            encoding=training.encoding,
            density=training.sparse_density,
            norms=request.settings.step_norms,
            ahead=open_checkpoint(request.left) if request.left is not None else None,
            taken=request.unsent_share,
        )
    write_seal(request.unsent_out, done.residual_checksums)
    return done.message_sha256
