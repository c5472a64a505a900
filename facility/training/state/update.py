"""The update directory: the received checkpoint's tensors by the same names, trained, in the dtype that travels."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from facility.exchange.checkpoints.adapters import write_adapter_config
from facility.exchange.checkpoints.checkpoint import ADAPTER, FLOATS, SINGLE, Checkpoint, open_checkpoint
from facility.exchange.checkpoints.companions import copy_companions
from facility.exchange.checkpoints.conversion import Conversion
from facility.exchange.checkpoints.delta import as_message
from facility.exchange.checkpoints.step_norms import StepNorms
from facility.exchange.files.durable import new_directory
from facility.exchange.messages import manifest as manifests
from facility.exchange.messages import report as reports
from facility.exchange.messages.settings import FacilitySettings
from facility.exchange.perplexity import perplexity
from facility.training import account
from facility.training.devices import device_name
from facility.training.model import Names
from facility.training.processes.ranks import Ranks, barrier, broadcast, gather, together
from facility.training.shards import LocalShard, shard_of
from facility.training.state.message import held_for_masks, held_tensors, write_message
from facility.training.state.save import Slot, create_files, plan_files, rounded, write_shards

if TYPE_CHECKING:
    from facility.rounds.masked import Masked

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


@torch.no_grad()
def round_in_place(parts: list[LocalShard], dtype: str) -> None:
    """Round the trained weights to the dtype they travel in: the model evaluated is the model returned."""
    for part in parts:
        part.tensor.copy_(rounded(part.name, part.tensor, getattr(torch, dtype)))


def outgoing_parts(parts: list[LocalShard], repeats: dict[str, str]) -> list[LocalShard]:
    """Everything the update holds: the model's parts, tied ones again under their other name, the rest as received."""
    own = [part for part in parts if not part.copy]
    by_name = {part.name: part for part in own}
    own += [dataclasses.replace(by_name[s], name=name) for name, s in repeats.items() if s in by_name]
    return own


def write_update(
    out: Path,
    model: Path,
    checkpoint: Checkpoint,
    tensors: list[tuple[str, str, tuple[int, ...]]],
    names: Names,
    base: manifests.Manifest | None,
    parts: list[LocalShard],
    ranks: Ranks,
    writes: bool,
    settings: FacilitySettings,
    round: int,
    add_files: Callable[[Path], None],
    unsent_out: Path | None = None,
    masks: Masked | None = None,
) -> None:
    """Write the update directory whole: `tensors` (name, dtype, shape) in that order, then what `add_files` writes.

    What no rank holds of the checkpoint is sent as received; `writes`: this rank's replica writes. `unsent_out`: write
    a message in the settings' encoding where that can be done from memory, and there what it leaves out. `masks`: leave
    the tensors masked in the state directory alone, where that can be done from memory.
    """
    adapters = settings.training.lora
    slots, headers = plan_files(tensors, single=ADAPTER if adapters.rank else SINGLE)
    conversion = None if settings.training.lora.rank else names.conversion
    mine = [part for part in parts if writes and held_in(part.name, slots, conversion)]
    if not ranks.first:
        temporary = Path(broadcast(ranks, None))
        barrier(ranks)
        with together(ranks):
            write_shards(temporary, slots, mine, conversion)
        barrier(ranks)
        return
    for name in sorted(set(slots) - names.known - {part.name for part in mine}):  # buffers and the like
        mine.append(shard_of(name, torch.nn.Parameter(checkpoint.read(name), requires_grad=False)))
    alone = ranks.world == 1
    streams = held_tensors(model, slots, mine, settings) if alone and unsent_out is not None else None
    masked = held_for_masks(model, slots, mine) if alone and masks is not None else None
    with new_directory(out) as temporary:
        broadcast(ranks, str(temporary))
        described = describe(tensors, base, settings, round)
        if streams is not None and unsent_out is not None:
            described = as_message(described, settings.training.encoding, model)
            known = write_message(temporary, unsent_out, *streams, settings)
        elif masked is not None and masks is not None:
            known = {}
            masks.hold(masked, received=model)
        else:
            known = write_whole(temporary, slots, headers, mine, conversion, checkpoint, ranks, settings)
        copy_companions(model, temporary)
        state_dtype(temporary, settings.training.export_dtype)
        if adapters.rank:
            write_adapter_config(temporary, adapters, slots)
        add_files(temporary)
        manifests.write_manifest(temporary, described, known)
    barrier(ranks)


def write_whole(
    directory: Path,
    slots: dict[str, Slot],
    headers: dict[str, bytes],
    mine: list[LocalShard],
    conversion: Conversion | None,
    checkpoint: Checkpoint,
    ranks: Ranks,
    settings: FacilitySettings,
) -> dict[str, str]:
    """Write the tensors of a whole update, on the first rank while all others write theirs, and the norms of its step.

    Returns the sha256 of the files where no other rank writes.
    """
    hashed = create_files(directory, slots, headers)
    barrier(ranks)
    norms = StepNorms(checkpoint) if settings.norms_of_whole else None
    alone = ranks.world == 1
    with together(ranks):
        known = write_shards(
            directory, slots, mine, conversion, hashed=hashed if alone else None, norms=norms if alone else None
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
    """Is the parameter of that name among the tensors that are written, whole or in pieces?"""
    return name in slots or (conversion is not None and name in conversion.pieces)


def outgoing_tensors(
    checkpoint: Checkpoint, adapters: dict[str, tuple[int, ...]] | None, export_dtype: str
) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of everything the update holds: the received tensors by their names, or adapters alone."""
    dtype = DTYPES[export_dtype]
    if adapters is not None:
        return [(name, dtype, shape) for name, shape in sorted(adapters.items())]
    return [(n, dtype if e.dtype in FLOATS else e.dtype, e.shape) for n, e in checkpoint.tensors.items()]


def write_evaluation(
    out: Path,
    settings: FacilitySettings,
    base: manifests.Manifest | None,
    ranks: Ranks,
    loss: float,
    load: float,
    evaluate: float,
    add: Callable[[Path], None] = lambda directory: None,
    accuracy: float | None = None,
    task: str = "",
) -> None:
    """Leave the final model's loss here as an update without weights. `add`: completes its manifest."""
    peak = max(gather(ranks, account.peak_memory_bytes(ranks)))
    if ranks.first:
        with new_directory(out) as temporary:
            reports.write(
                temporary,
                reports.Report(
                    federation=settings.federation,
                    facility=settings.facility,
                    round=settings.rounds,
                    samples=0,
                    tokens=0,
                    steps=0,
                    loss_received=loss,
                    loss_returned=loss,
                    perplexity_received=perplexity(loss),
                    perplexity_returned=perplexity(loss),
                    training_loss=loss,
                    peak_memory_bytes=peak,
                    ranks=ranks.world,
                    seconds=reports.Seconds(load=load, evaluate=evaluate),
                    devices=[device_name(ranks.device)],
                    versions=account.versions(),
                    details=reports.accuracies(received=accuracy) | ({reports.TASK: task} if task else {}),
                ),
            )
            manifests.write_manifest(
                temporary,
                manifests.Manifest(
                    kind="update",
                    federation=settings.federation,
                    round=settings.rounds,
                    facility=settings.facility,
                    base_sha256=base.content_sha256 if base else None,
                ),
            )
            add(temporary)
    barrier(ranks)


def state_dtype(directory: Path, dtype: str) -> None:
    """State the export's dtype in `config.json`; where adapters alone were received there is none."""
    file = directory / "config.json"
    if not file.is_file():
        return
    config = json.loads(file.read_text())
    config["dtype"] = dtype
    config.pop("torch_dtype", None)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
