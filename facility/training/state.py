"""What a facility keeps between rounds: AdamW's moments and the position in its data, one directory a round.

`round-N` is written whole when round N ends. Round N reads `round-(N-1)`, so doing round N again, after the
coordinator died for instance, starts from the same state and ends in the same bytes. Two are kept. Tensors lie whole
in safetensors files, so a later round may run on another number of ranks or in another layout.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from facility.exchange.checkpoint import open_checkpoint
from facility.exchange.durable import new_directory, write_json
from facility.exchange.errors import CheckpointError, ConfigurationError
from facility.exchange.settings import FacilitySettings, from_mapping

from .load import Part, load_parts
from .ranks import Ranks, barrier, broadcast, together
from .save import create_files, plan_files, write_parts

FORMAT = 1
NAME = "state.json"
PAUSED = "paused"
Shapes = dict[str, tuple[int, ...]]
"""Every trained parameter of the whole model, by name on disk."""
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class RoundState:
    """`state.json`."""

    federation: str
    facility: str
    seed: int
    round: int
    position: int
    """Sequences consumed since round 0."""
    optimizer_steps: int
    """Steps that the moments have seen; 0 when there are none."""
    format: int = FORMAT


@dataclass(frozen=True, kw_only=True)
class Pause:
    """`state.json` of `paused`: where an interrupted round stands."""

    federation: str
    facility: str
    seed: int
    round: int
    base_sha256: str
    """Digest of the received model: a pause is of use for the same model only."""
    steps: int
    """Steps done of this round."""
    position: int
    optimizer_steps: int
    loss_received: float
    losses: list[float]
    """Loss of every step so far; -1 for a skipped one."""
    seconds: float
    """Training time so far."""
    scale: float
    """fp16 loss scale."""
    skipped: int
    interruptions: int
    format: int = FORMAT


def read_state(directory: Path, settings: FacilitySettings, round: int) -> tuple[RoundState | None, str]:
    """State that round `round` continues from, or None, and the reason."""
    if round == 0:
        return None, "round 0 starts with a fresh optimizer at the beginning of the data"
    path = directory / f"round-{round - 1}"
    if not (path / NAME).is_file():
        return None, f"{path} is absent (this facility sat out round {round - 1}, or its state was moved)"
    try:
        state = from_mapping(RoundState, json.loads((path / NAME).read_text()), file=path / NAME)
    except (OSError, ValueError, ConfigurationError) as error:
        raise CheckpointError(f"{path / NAME} is unreadable: {error}; remove {path} to start afresh") from None
    if state.format > FORMAT:
        raise CheckpointError(f"{path / NAME} has format {state.format}, this version reads up to {FORMAT}")
    mine = (settings.federation, settings.facility, settings.seed)
    if (state.federation, state.facility, state.seed) != mine:
        return None, f"{path} belongs to {(state.federation, state.facility, state.seed)}, this run is {mine}"
    return state, f"continuing from {path}"


def moments_of(optimizer: torch.optim.Optimizer, parts: Sequence[Part]) -> list[Part]:
    """AdamW's moments, those of copies left out, as parts named `exp_avg.<parameter>`; absent ones are made, filled with zeros."""
    moments = []
    for part in parts:
        state = optimizer.state[part.tensor]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=part.tensor.device)
            for moment in MOMENTS:
                state[moment] = torch.zeros_like(part.tensor)
        moments += [dataclasses.replace(part, name=f"{m}.{part.name}", tensor=state[m]) for m in MOMENTS]
    return moments


def load_moments(directory: Path, optimizer: torch.optim.Optimizer, parts: Sequence[Part], steps: int) -> None:
    """Fill the optimizer from a state directory."""
    load_parts(moments_of(optimizer, parts), open_checkpoint(directory))
    for part in parts:
        optimizer.state[part.tensor]["step"].fill_(float(steps))


def publish(
    path: Path, ranks: Ranks, tensors: Sequence[tuple[str, tuple[int, ...]]], parts: Sequence[Part], message: object
) -> None:
    """Write a directory whole: float32 tensors of which every rank holds some rows, and `state.json`; replaces `path`."""
    slots, headers = plan_files([(name, "F32", shape) for name, shape in tensors])

    def write_mine(temporary: Path) -> None:
        barrier(ranks)
        with together(ranks):
            write_parts(temporary, slots, parts)

    if not ranks.first:
        write_mine(Path(broadcast(ranks, None)))
        barrier(ranks)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    with new_directory(new) as temporary:
        broadcast(ranks, str(temporary))
        create_files(temporary, slots, headers if tensors else {})
        write_mine(temporary)
        write_json(temporary / NAME, dataclasses.asdict(message))  # type: ignore[call-overload]
    shutil.rmtree(path, ignore_errors=True)
    os.rename(new, path)
    barrier(ranks)


def save_state(
    directory: Path, state: RoundState, ranks: Ranks, shapes: Shapes, optimizer: torch.optim.Optimizer | None,
    parts: Sequence[Part], *, writes: bool,
) -> None:  # fmt: skip
    """Write `round-N`, drop what later rounds cannot need. `writes`: this rank's replica is the one that writes."""
    tensors, mine = [], []
    if optimizer is not None:
        tensors = [(f"{moment}.{name}", shape) for name, shape in shapes.items() for moment in MOMENTS]
        mine = [part for part in moments_of(optimizer, parts) if writes and not part.copy]
    publish(directory / f"round-{state.round}", ranks, tensors, mine, state)
    if ranks.first:
        shutil.rmtree(directory / PAUSED, ignore_errors=True)
        for other in directory.glob("round-*"):
            match = re.fullmatch(r"round-(\d+)", other.name)
            if match and int(match[1]) not in (state.round - 1, state.round):
                shutil.rmtree(other, ignore_errors=True)


def save_pause(
    directory: Path, pause: Pause, ranks: Ranks, shapes: Shapes, optimizer: torch.optim.Optimizer,
    parts: Sequence[Part], *, writes: bool,
) -> None:  # fmt: skip
    """Write `paused`: master weights, moments and position in the middle of a round."""
    names = [*MOMENTS, "weight"]
    tensors = [(f"{kind}.{name}", shape) for name, shape in shapes.items() for kind in names]
    mine = []
    if writes:
        mine = moments_of(optimizer, parts)
        mine += [dataclasses.replace(part, name=f"weight.{part.name}") for part in parts]
    publish(directory / PAUSED, ranks, tensors, [part for part in mine if not part.copy], pause)


def read_pause(directory: Path, settings: FacilitySettings, round: int, base_sha256: str) -> Pause | None:
    """What an interrupted attempt at this round left; None when there is none, or it began from another model."""
    file = directory / PAUSED / NAME
    if not file.is_file():
        return None
    try:
        pause = from_mapping(Pause, json.loads(file.read_text()), file=file)
    except (OSError, ValueError, ConfigurationError) as error:
        raise CheckpointError(
            f"{file} is unreadable: {error}; remove {file.parent} to start the round afresh"
        ) from None
    mine = (settings.federation, settings.facility, settings.seed, round, base_sha256)
    same = (pause.federation, pause.facility, pause.seed, pause.round, pause.base_sha256) == mine
    return pause if same and pause.format <= FORMAT else None


@torch.no_grad()
def load_pause(directory: Path, pause: Pause, optimizer: torch.optim.Optimizer, parts: Sequence[Part]) -> None:
    """Put weights and moments back."""
    load_moments(directory / PAUSED, optimizer, parts, pause.optimizer_steps)
    weights = [dataclasses.replace(part, name=f"weight.{part.name}") for part in parts]
    load_parts(weights, open_checkpoint(directory / PAUSED))
