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


def default_directory(settings: FacilitySettings, dataset: Path) -> Path:
    """$CROSSFED_STATE/<federation>/<facility>, or `.crossfed/<federation>/<facility>` beside the dataset."""
    root = os.environ.get("CROSSFED_STATE")
    base = Path(root) if root else Path(dataset).absolute().parent / ".crossfed"
    return base / settings.federation / settings.facility


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
    """AdamW's moments as parts named `exp_avg.<parameter>`; absent ones are made, filled with zeros."""
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


def write_tensors(
    ranks: Ranks, directory: Path, shapes: Sequence[tuple[str, tuple[int, ...]]], parts: Sequence[Part]
) -> None:
    """Write float32 tensors of which every rank holds some rows into an existing directory."""
    slots, headers = plan_files([(name, "F32", shape) for name, shape in shapes])
    if ranks.first:
        create_files(directory, slots, headers)
    barrier(ranks)
    with together(ranks):
        write_parts(directory, slots, parts)


def save_state(
    directory: Path,
    state: RoundState,
    ranks: Ranks,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    optimizer: torch.optim.Optimizer | None,
    parts: Sequence[Part],
) -> None:
    """Write `round-N` whole and drop what rounds N+1 on cannot need. `shapes`: every trained parameter of the model."""
    path = directory / f"round-{state.round}"
    if not ranks.first:
        temporary = Path(broadcast(ranks, None))
        if optimizer is not None:
            write_moments(ranks, temporary, shapes, optimizer, parts)
        barrier(ranks)
        return
    directory.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(path, ignore_errors=True)
    with new_directory(path) as temporary:
        broadcast(ranks, str(temporary))
        if optimizer is not None:
            write_moments(ranks, temporary, shapes, optimizer, parts)
        write_json(temporary / NAME, dataclasses.asdict(state))
    for other in directory.glob("round-*"):
        match = re.fullmatch(r"round-(\d+)", other.name)
        if match and int(match[1]) not in (state.round - 1, state.round):
            shutil.rmtree(other, ignore_errors=True)
    barrier(ranks)


def write_moments(
    ranks: Ranks,
    directory: Path,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    optimizer: torch.optim.Optimizer,
    parts: Sequence[Part],
) -> None:
    named = [(f"{moment}.{name}", shape) for name, shape in shapes for moment in MOMENTS]
    write_tensors(ranks, directory, named, moments_of(optimizer, parts))
