"""Where a round begins: fresh, after the previous round's state, or at a mid-round checkpoint."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace

import torch

from facility.exchange.messages.settings import TrainingSettings
from facility.training.engine import Engine
from facility.training.loss_scale import LossScale
from facility.training.lost import replica_share
from facility.training.processes.ranks import agree_on_failure
from facility.training.request import RoundRequest
from facility.training.state import moments, second_moments, state

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RoundProgress:
    """How far this rank's replica is in the round."""

    position: int
    """Sequences consumed since round 0."""
    done: int = 0
    """Steps of this round, those before interruptions included."""
    sequences: int = 0
    """Sequences that this replica has taken these steps on."""
    optimizer_steps: int = 0
    """Steps that the optimizer's moments have seen."""
    losses: list[float] = field(default_factory=list)
    """Loss of each step; -1 for one that was skipped, or had nothing to predict."""
    samples: float = 0.0
    """What the policy between replicas counted before an interruption."""
    rates: float = 0.0
    """Sum of the learning rates of this round's steps before an interruption, where drift is corrected."""
    loss_received: float = math.nan
    accuracy_received: float | None = None
    """Share of right answers; None for a task that has none."""
    interruptions: int = 0
    seconds_before: float = 0.0
    """Training time before interruptions."""

    def step(self, loss: float, *, skipped: bool, batch: int, share: int) -> None:
        """Count one step on `batch` sequences, of which this replica has its `share`."""
        self.losses.append(-1.0 if skipped else loss)
        self.done, self.position, self.sequences = self.done + 1, self.position + batch, self.sequences + share
        self.optimizer_steps += not skipped


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """What the state directory holds for this round."""

    previous: state.RoundState | None
    """The previous round's; None: none that fits, for the reason."""
    reason: str
    checkpoint: state.MidRoundCheckpoint | None
    """Of an interrupted attempt at this round."""


def read_saved_state(request: RoundRequest, base_sha256: str) -> SavedState:
    """Find what this round continues from. Raises `CheckpointError` where it is unreadable."""
    previous, reason = state.read_state(request.state, request.settings, request.round)
    checkpoint = state.read_checkpoint(request.state, request.settings, request.round, base_sha256)
    return SavedState(previous=previous, reason=reason, checkpoint=checkpoint)


def that_fits(request: RoundRequest, saved: SavedState, engine: Engine) -> SavedState:
    """The part of the saved state that has the parameters and the form that the settings ask for now.

    Where layers were frozen that are trained now, adapters had another rank, or the optimizer's parameters kept
    something else, the optimizer begins anew, and so does an interrupted round.
    """
    previous, found, shapes = saved.previous, saved.checkpoint, engine.assembly.shapes
    with agree_on_failure(engine.ranks):
        if found is not None:
            kinds = [*found.sync, "weight"]
            if odd := state.lacking(
                request.state / state.PAUSED, engine.optimizer, shapes, vectors=kinds, prefix="replica-0."
            ):
                log.info("the round begins anew: its interrupted attempt kept no %s of this form", odd)
                found = None
        if found is not None and (done := more_than_asked(found, request.training)):
            log.info("the round begins anew: its interrupted attempt was one of other settings, and took %s", done)
            found = None
        if previous is not None and previous.optimizer_steps and request.training.keep_optimizer:
            directory = request.state / f"round-{previous.round}"
            if odd := state.lacking(directory, engine.optimizer, shapes, vectors=previous.sync):
                log.info("the optimizer begins with new state: %s holds no %s of this form", directory, odd)
                previous = replace(previous, optimizer_steps=0, sync=[])
    return replace(saved, previous=previous, checkpoint=found)


def more_than_asked(found: state.MidRoundCheckpoint, training: TrainingSettings) -> str:
    """What an interrupted attempt has trained on beyond the steps and the batch that the settings ask for now, which
    limit what a facility counts for; empty: nothing."""
    done = max(replica.steps for replica in found.replicas)
    lockstep = len(found.replicas) == 1
    if lockstep and done > training.steps:
        return f"{done} steps, where the round has {training.steps}"
    if found.sequences > (done if lockstep else training.steps) * training.batch_sequences:
        return f"{done} steps on {found.sequences} sequences, where a batch has {training.batch_sequences}"
    return ""


def restore_state(
    request: RoundRequest, saved: SavedState, engine: Engine, *, replica: int, replicas: int
) -> RoundProgress:
    """Load optimizer state (and weights, mid-round); `replica` of `replicas` that have weights of their own."""
    training, previous, found = request.training, saved.previous, saved.checkpoint
    if found is not None:
        with agree_on_failure(engine.ranks):
            state.load_checkpoint(request.state, found, engine, replica=replica, replicas=replicas)
        here = found.progress_of(replica, replicas)
        share = replica_share(engine.layout, replica, together=engine.together)
        engine.skipped = here.skipped
        if found.compute_dtype in ("", training.compute_dtype):
            engine.bad_in_a_row = here.bad_in_a_row
            engine.scale = LossScale(adapts=engine.scale.adapts, value=here.scale, steady=here.steady)
        return RoundProgress(
            position=here.position,
            done=here.steps,
            sequences=here.sequences if here.sequences >= 0 else here.steps * share,
            optimizer_steps=here.optimizer_steps,
            losses=here.losses,
            samples=here.samples,
            rates=here.rates,
            loss_received=found.loss_received,
            accuracy_received=found.accuracy_received,
            interruptions=found.interruptions + 1,
            seconds_before=found.seconds,
        )
    steps_before = request.round * request.settings.training.steps
    position = previous.position if previous else steps_before * engine.layout.shape.batch_sequences
    progress = RoundProgress(position=position)
    if previous is not None and previous.loss_scale:
        scale = LossScale(adapts=engine.scale.adapts, value=previous.loss_scale, steady=previous.steady)
        engine.scale = scale
    if previous is not None and previous.optimizer_steps and training.keep_optimizer:
        with agree_on_failure(engine.ranks):
            directory = request.state / f"round-{previous.round}"
            state.load_moments(
                directory, engine.optimizer, engine.parts, previous.optimizer_steps, betas=previous.betas
            )
        progress.optimizer_steps = previous.optimizer_steps
    brought: frozenset[str] = frozenset()
    if training.optimizer_state == "shared":
        with agree_on_failure(engine.ranks):
            progress.optimizer_steps, brought = second_moments.take_over(
                request.model, engine.optimizer, engine.parts, beta2=training.beta2, steps=progress.optimizer_steps
            )
    if training.travelling_moments:
        with agree_on_failure(engine.ranks):
            progress.optimizer_steps = moments.take_over(
                request.model,
                engine.optimizer,
                engine.parts,
                training,
                steps=progress.optimizer_steps,
                brought=brought,
            )
    return progress


def restore_vectors(
    request: RoundRequest,
    saved: SavedState,
    progress: RoundProgress,
    engine: Engine,
    vectors: dict[str, torch.Tensor],
    *,
    replica: int,
    replicas: int,
) -> None:
    """Fill what the policy between replicas keeps, from the same place as the optimizer's state."""
    found, previous = saved.checkpoint, saved.previous
    if found is not None:
        which = replica if len(found.replicas) == replicas else 0
        state.load_vectors(request.state / state.PAUSED, found.sync, vectors, engine.parts, replica=which)
    elif progress.optimizer_steps and previous is not None and previous.sync:
        state.load_vectors(request.state / f"round-{previous.round}", previous.sync, vectors, engine.parts)
