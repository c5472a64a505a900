"""The update directory: the received checkpoint's tensors by the same names, trained, in the dtype that travels."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from facility.exchange.checkpoints.adapters import write_adapter_config
from facility.exchange.checkpoints.checkpoint import (
    ADAPTER,
    FLOATS,
    SINGLE,
    STORED_AS,
    Checkpoint,
    TensorEntry,
    open_checkpoint,
)
from facility.exchange.checkpoints.companions import copy_companions, state_dtype
from facility.exchange.checkpoints.conversion import Conversion
from facility.exchange.checkpoints.delta import as_message
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.checkpoints.running_statistics import is_running_statistic
from facility.exchange.checkpoints.step_norms import StepNorms
from facility.exchange.files.durable import new_directory
from facility.exchange.messages import manifest as manifests
from facility.exchange.messages.settings import FacilitySettings
from facility.training.model import Names
from facility.training.processes.ranks import Ranks, agree_on_failure, barrier, broadcast
from facility.training.request import RoundRequest
from facility.training.shards import LocalShard, shard_of
from facility.training.state.message import held_for_masks, held_tensors, write_message
from facility.training.state.save import Slot, create_files, plan_files, round_to_export, write_shards


@torch.no_grad()
def round_in_place(parts: list[LocalShard], dtype: str) -> None:
    """Round the trained weights to the dtype they travel in: the model evaluated is the model returned."""
    for part in parts:
        part.tensor.copy_(round_to_export(part.name, part.tensor, getattr(torch, dtype)))


def outgoing_parts(parts: list[LocalShard], repeats: dict[str, str]) -> list[LocalShard]:
    """Everything the update holds: the model's parts, tied ones again under their other name, the rest as received."""
    own = [part for part in parts if not part.copy]
    by_name = {part.name: part for part in own}
    own += [dataclasses.replace(by_name[s], name=name) for name, s in repeats.items() if s in by_name]
    return own


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """The update of a round, as one rank sees it."""

    request: RoundRequest
    checkpoint: Checkpoint
    """The received model."""
    base: manifests.Manifest | None
    """Its manifest."""
    tensors: list[tuple[str, str, tuple[int, ...]]]
    """(name, dtype, shape) of what is written, in that order."""
    model_class: str
    """The class of transformers that was trained."""
    names: Names
    parts: list[LocalShard]
    """What this rank holds of it."""
    ranks: Ranks
    writes: bool
    """Whether this rank's replica writes."""

    @property
    def alone(self) -> bool:
        """One rank holds and writes everything."""
        return self.ranks.world == 1

    @cached_property
    def plan(self) -> tuple[dict[str, Slot], dict[str, bytes]]:
        """Where each tensor goes, and the header of each file."""
        return plan_files(self.tensors, single=ADAPTER if self.request.settings.training.lora.rank else SINGLE)

    @property
    def slots(self) -> dict[str, Slot]:
        return self.plan[0]

    @property
    def conversion(self) -> Conversion | None:
        """From the model's own tensors to the checkpoint's; adapters have none."""
        return None if self.request.settings.training.lora.rank else self.names.conversion

    @cached_property
    def mine(self) -> list[LocalShard]:
        """What this rank writes; the first one adds what no rank holds (buffers and the like), as received."""
        found = [part for part in self.parts if self.writes and held_in(part.name, self.slots, self.conversion)]
        if self.ranks.first:
            for name in sorted(set(self.slots) - self.names.known - {part.name for part in found}):
                found.append(shard_of(name, torch.nn.Parameter(self.checkpoint.read(name), requires_grad=False)))
        return found


def write_update(update: Outgoing, add_files: Callable[[Path], None]) -> None:
    """Write the update directory whole: its tensors, then what `add_files` writes.

    Where that can be done from memory, and the request asks for it, the tensors are written as a message in the
    settings' encoding, or are left masked in the state directory alone.
    """
    request, ranks = update.request, update.ranks
    if not ranks.first:
        temporary = Path(broadcast(ranks, None))
        barrier(ranks)
        with agree_on_failure(ranks):
            write_shards(temporary, update.slots, update.mine, update.conversion)
        barrier(ranks)
        return
    training = request.settings.training
    with new_directory(request.out) as temporary:
        broadcast(ranks, str(temporary))
        described, known = write_tensors_of(update, temporary)
        copy_companions(request.model, temporary)
        state_dtype(temporary, training.export_dtype)
        if training.lora.rank:
            write_adapter_config(temporary, training.lora, update.slots, model_class=update.model_class)
        add_files(temporary)
        manifests.write_manifest(temporary, described, known)
    barrier(ranks)


def write_tensors_of(update: Outgoing, directory: Path) -> tuple[manifests.Manifest, dict[str, str]]:
    """Write the tensors in the way that the request asks for and this rank can; on the first rank.

    Returns the manifest without its files, and the sha256 of those that are known already.
    """
    request, model, slots = update.request, update.request.model, update.slots
    described = describe(update.tensors, update.base, request.settings, request.round)
    if update.alone and request.unsent_out is not None:
        if (streams := held_tensors(model, slots, update.mine, request.settings)) is not None:
            described = as_message(described, request.settings.training.encoding, model)
            return described, write_message(directory, *streams, request)
    if update.alone and request.masks is not None:
        if (held := held_for_masks(model, slots, update.mine)) is not None:
            request.masks.hold(held, received=model)
            return described, {}
    return described, write_whole(update, directory)


def write_whole(update: Outgoing, directory: Path) -> dict[str, str]:
    """Write the tensors of a whole update, on the first rank while all others write theirs, and the norms of its step.

    Returns the sha256 of the files where no other rank writes.
    """
    slots, headers = update.plan
    hashed = create_files(directory, slots, headers)
    barrier(update.ranks)
    norms = StepNorms(update.checkpoint) if update.request.settings.norms_of_whole else None
    alone = update.alone
    with agree_on_failure(update.ranks):
        known = write_shards(
            directory,
            slots,
            update.mine,
            update.conversion,
            hashed=hashed if alone else None,
            norms=norms if alone else None,
        )
    if norms is not None:
        state_norms(norms, directory, from_disk=not alone)
    return known


def describe(
    tensors: list[tuple[str, str, tuple[int, ...]]],
    base: manifests.Manifest | None,
    settings: FacilitySettings,
    round: int,
) -> manifests.Manifest:
    """The manifest of an update of `tensors` (name, dtype, shape) to the received model `base`, without its files."""
    return manifests.Manifest(
        kind="update",
        federation=settings.federation,
        round=round,
        facility=settings.facility,
        base_sha256=base.content_sha256 if base else None,
        dtypes=dict(sorted(Counter(dtype for _, dtype, _ in tensors).items())),
        encoding="lora" if settings.training.lora.rank else "full",
        parameters=sum(torch.Size(shape).numel() for _, _, shape in tensors),
    )


def state_norms(norms: StepNorms, directory: Path, *, from_disk: bool) -> None:
    """Write the norms of the update's step; `from_disk`: of what all ranks have written there."""
    with norms:
        if from_disk:
            norms.read(open_checkpoint(directory))
        norms.write(directory)


def held_in(name: str, slots: dict[str, Slot], conversion: Conversion | None) -> bool:
    """True if the parameter of that name is among the tensors that are written, whole or in pieces."""
    return name in slots or (conversion is not None and name in conversion.pieces)


def is_personal(part: LocalShard, names: Names, federated: Patterns) -> bool:
    """Whether nothing of a parameter is federated: it stays here, and need not be rounded to the dtype that travels."""
    pieces = names.conversion.pieces
    stored = pieces[part.name].tensors if part.name in pieces else (part.name,)
    return not any(map(federated.federated, stored))


def outgoing_tensors(
    checkpoint: Checkpoint,
    trained: dict[str, tuple[int, ...]],
    names: Names,
    export_dtype: str,
    *,
    adapters: bool,
    federated: Patterns,
) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of everything the update holds: the received tensors by their names, or `adapters` alone.

    `trained`: shapes of what is trained. What is not stays as received, also where the export's dtype is narrower: its
    rounding would be averaged, and moved by a server optimizer, as if it were a step. What is not `federated` stays at
    the facility in float32, as the weights are in training: in half precision a norm near 1 would never leave it.
    """

    def exported(name: str) -> str:
        return STORED_AS[export_dtype] if federated.federated(name) else "F32"

    if adapters:
        return [(name, exported(name), shape) for name, shape in sorted(trained.items())]
    pieces = names.conversion.pieces
    changed = {tensor for name in trained for tensor in (pieces[name].tensors if name in pieces else (name,))}
    changed |= {name for name, source in names.repeats.items() if source in trained}

    def sent_as(entry: TensorEntry) -> str:
        stays = entry.name not in changed and not is_running_statistic(entry.name) and export_dtype != "float32"
        return entry.dtype if stays or entry.dtype not in FLOATS else exported(entry.name)

    return [(name, sent_as(entry), entry.shape) for name, entry in checkpoint.tensors.items()]
