"""The reference model's preference for every pair, measured once at the facility and kept beside its state.

STATE/reference/train.npy, validation.npy   float64, log q(chosen) - log q(rejected) of each pair
STATE/reference/reference.json              of which dataset and federation they are
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from facility.dataset import SPLITS, PreparedDataset
from facility.exchange.checkpoints.adapters import PREFIX, B, is_factor, is_magnitude
from facility.exchange.checkpoints.checkpoint import Checkpoint, open_checkpoint
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.files.durable import new_directory, write_json
from facility.exchange.files.paths import resolve_path
from facility.exchange.json_values import values_in
from facility.exchange.messages.preference import BENEATH
from facility.exchange.validation import parse_dataclass, validated
from facility.training import dora
from facility.training.data.inputs import RoundInputs
from facility.training.data.preference import Preference
from facility.training.engine import Engine
from facility.training.parallel.shard import drop_gathered
from facility.training.processes.ranks import Ranks, agree_on_failure, barrier, gather
from facility.training.request import RoundRequest
from facility.training.shards import load_shards

FOLDER, NAME = "reference", "reference.json"
log = logging.getLogger(__name__)


@validated(frozen=True, kw_only=True)
class ReferenceNote:
    """`reference.json`."""

    federation: str
    seed: int
    reference: str
    """The setting it was measured under: a path, or empty for the model of round 0."""
    base_sha256: str
    """Digest of the model of round 0, where that was measured; empty where it carried no manifest."""
    datasets: dict[str, list[str]]
    """By split: digests of ids and marks."""
    format: int = 1


def prepare_reference(request: RoundRequest, inputs: RoundInputs, engine: Engine, ranks: Ranks) -> None:
    """Give the task the reference's differences: those that are kept, or measured now. Raises `InputError`."""
    task = inputs.task
    assert isinstance(task, Preference)
    folder = request.state / FOLDER
    wanted = note_of(request, inputs)
    with agree_on_failure(ranks):
        kept = is_kept(folder, wanted, first=request.round == 0) if ranks.first else False
    if not any(gather(ranks, kept)):
        with agree_on_failure(ranks):
            source = reference_of(request, inputs)
        own = [part.tensor.detach().clone() for part in engine.assembly.parts]
        with agree_on_failure(ranks):
            load_reference(engine, inputs, source)
        found = {split: measure(engine, inputs, ranks, split) for split in SPLITS}
        with agree_on_failure(ranks):
            load_shards(engine.assembly.quantized, inputs.checkpoint, engine.assembly.names.conversion)
        with torch.no_grad():
            for part, values in zip(engine.assembly.parts, own, strict=True):
                part.tensor.copy_(values)
        if ranks.first:
            shutil.rmtree(folder, ignore_errors=True)
            with new_directory(folder) as directory:
                for split, values_of_split in found.items():
                    np.save(directory / f"{split}.npy", values_of_split)
                write_json(directory / NAME, dataclasses.asdict(wanted))
        log.info("reference: %d pairs measured, kept in %s", sum(map(len, found.values())), folder)
    barrier(ranks)
    with agree_on_failure(ranks):
        task.reference = {split: read_split(folder, split, inputs.dataset) for split in SPLITS}


def note_of(request: RoundRequest, inputs: RoundInputs) -> ReferenceNote:
    """What the differences of this federation and dataset would be noted as."""
    splits = inputs.dataset.manifest.splits
    return ReferenceNote(
        federation=request.settings.federation,
        seed=request.settings.seed,
        reference=request.training.preference.reference,
        base_sha256=inputs.base_sha256 if request.round == 0 else "",
        datasets={name: [entry.sha256, entry.marks_sha256 or ""] for name, entry in splits.items()},
    )


def is_kept(folder: Path, wanted: ReferenceNote, *, first: bool) -> bool:
    """True if these differences are kept already; after the first round the model of round 0 is not compared."""
    try:
        found = parse_dataclass(ReferenceNote, values_in(folder / NAME), file=folder / NAME)
    except (OSError, ValueError, ConfigurationError):
        return False
    if not first:
        found = dataclasses.replace(found, base_sha256="")
    return found == wanted


def reference_of(request: RoundRequest, inputs: RoundInputs) -> Checkpoint | None:
    """The checkpoint of the reference model; None: the model beneath the adapters. Raises `InputError` where there is
    none here."""
    if request.training.preference.reference == BENEATH:
        return None
    if request.training.preference.reference:
        return open_checkpoint(resolve_path(request.training.preference.reference))
    if request.round == 0:
        return inputs.received
    beneath = f", or to {BENEATH!r} where that one had no adapters" if request.training.lora.rank else ""
    raise InputError(
        f"round {request.round} needs the reference's log-probabilities, and {request.state / FOLDER} holds none for "
        "this dataset: the facility took no part in round 0, or its state or dataset changed; set "
        f"training.preference.reference to a copy of the initial model there{beneath}"
    )


@torch.no_grad()
def load_reference(engine: Engine, inputs: RoundInputs, source: Checkpoint | None) -> None:
    """Put the reference's weights into the model: an adapter that it does not hold adds nothing.

    `source`: None, where the reference is what is beneath the adapters, and frozen there already.
    """
    names = engine.assembly.names
    tensors = source.tensors if source is not None else {}
    plain = [part for part in engine.assembly.parts if not part.name.startswith(PREFIX)]
    adapters = [part for part in engine.assembly.parts if part.name.startswith(PREFIX)]
    if source is None or (tensors and all(name.startswith(PREFIX) for name in tensors)):
        beneath = inputs.checkpoint
    else:
        beneath = source
        load_shards([*plain, *engine.assembly.quantized], source, names.conversion)
    for part in adapters:
        if source is not None and part.name in tensors:
            load_shards([part], source)
        elif is_magnitude(part.name):
            dora.initialise_magnitudes(part, names.magnitudes[part.name], beneath, names.conversion)
        elif not is_factor(part.name):
            own = dataclasses.replace(part, name=names.saved[part.name])
            load_shards([own], beneath, names.conversion)
        elif B in part.name:
            part.tensor.zero_()


@torch.no_grad()
def measure(engine: Engine, inputs: RoundInputs, ranks: Ranks, split: str) -> np.ndarray:
    """The differences of all pairs of a split; each data-parallel rank measures its share."""
    layout, task = engine.layout, inputs.task
    mine, readers = layout.grid.data_rank(ranks.rank), layout.grid.data_ranks
    count, rows = len(inputs.dataset.split(split)), layout.shape.micro_batch_sequences
    found = torch.zeros(count, dtype=torch.float64)
    for module in engine.compute.modules:
        module.eval()
    for begin in range(0, count, rows * readers):
        first = begin + mine * rows
        indices = np.arange(first, first + rows).clip(max=count - 1)  # every rank makes as many forward passes
        values = engine.compute.evaluate(task.batch(inputs.dataset, split, indices, [0] * rows))[0]
        if engine.compute.tells_loss and first < count:
            real = min(rows, count - first)
            found[first : first + real] = values[:real].double().cpu()
    drop_gathered(engine.compute.modules)
    if ranks.world > 1:
        dist.all_reduce(found)
    return found.numpy()


def read_split(folder: Path, split: str, dataset: PreparedDataset) -> np.ndarray:
    """The differences of a split. Raises `InputError` for a file that is not one of the dataset's length."""
    try:
        values = np.load(folder / f"{split}.npy", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{folder / split}.npy cannot be read: {error}; remove {folder} to measure again") from None
    if values.dtype != np.float64 or values.shape != (len(dataset.split(split)),):
        raise InputError(f"{folder / split}.npy holds {values.dtype} of shape {values.shape}; remove {folder}")
    return values
