"""The last stages of a round on one rank: figures of all ranks, state for the next round, the report, the update.

Every rank calls each function at the same place: they gather, and wait for each other. The update appears last, so that
a round without one is done again.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from facility.exchange.errors import ConfigurationError
from facility.exchange.files.durable import new_directory
from facility.exchange.messages import drift, loss_curve, lost_replicas
from facility.exchange.messages import report as reports
from facility.exchange.messages.manifest import Manifest, write_manifest
from facility.exchange.messages.privacy import DETAILS, WITHHELD
from facility.exchange.perplexity import perplexity
from facility.training import account
from facility.training.devices import device_name
from facility.training.drift import KIND, is_in
from facility.training.loss_scale import LossScale
from facility.training.model import class_of
from facility.training.processes.ranks import agree_on_failure, barrier, gather
from facility.training.round import Round
from facility.training.state import moments, second_moments, state
from facility.training.state.leaving import Leaving
from facility.training.state.update import (
    Outgoing,
    outgoing_parts,
    outgoing_tensors,
    write_update,
)
from facility.training.trained_rank import trained_whole

log = logging.getLogger(__name__)


def finish_evaluation(round: Round) -> None:
    """Write the report of a round that only evaluates the final model."""
    seconds = round.times.evaluated - round.times.loaded
    write_evaluation(round, round.inputs.base, seconds, accuracy=round.progress.accuracy_received)


def write_evaluation(
    round: Round,
    base: Manifest | None,
    evaluate_seconds: float,
    *,
    accuracy: float | None = None,
    add: Callable[[Path], None] = lambda directory: None,
) -> None:
    """Leave the final model's loss as an update without weights, made from `base`. `add`: completes its manifest."""
    settings, ranks, times, loss = round.request.settings, round.ranks, round.times, round.progress.loss_received
    task = round.inputs.dataset.manifest.task
    peak = max(gather(ranks, account.peak_memory_bytes(ranks)))
    details: dict[str, Any] = reports.accuracies(received=accuracy) | ({reports.TASK: task} if task else {})
    if round.private is not None:
        details[DETAILS] = round.private.details()
    if ranks.first:
        with new_directory(round.request.out) as temporary:
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
                    seconds=reports.Seconds(load=times.loaded - round.request.began, evaluate=evaluate_seconds),
                    devices=[device_name(ranks.device)],
                    versions=account.versions(),
                    details=details,
                ),
            )
            write_manifest(
                temporary,
                Manifest(
                    kind="update",
                    federation=settings.federation,
                    round=settings.rounds,
                    facility=settings.facility,
                    base_sha256=base.content_sha256 if base else None,
                ),
            )
            add(temporary)
    barrier(ranks)


def finish_round(round: Round) -> None:
    """Keep the state for the next round and write the update with its report. Raises `ConfigurationError`."""
    walked = take_walk(round)
    taken = steps_taken(round)
    save_state(round, taken.scale)
    if round.private is None and taken.good == 0:
        raise ConfigurationError(every_step_skipped(taken.scale, round.progress.done))
    request, inputs, held = round.request, round.inputs, round.engine.assembly
    figures = measure(round, taken, walked)
    adapters, dtype = bool(request.training.lora.rank), request.training.export_dtype
    tensors = outgoing_tensors(
        inputs.checkpoint, held.shapes, held.names, dtype, adapters=adapters, federated=request.federated
    )
    update = Outgoing(
        request=request,
        checkpoint=inputs.checkpoint,
        base=inputs.base,
        tensors=tensors,
        model_class=class_of(inputs.config, inputs.task.factory).__name__,
        names=held.names,
        parts=outgoing_parts([*held.parts, *held.statistics], held.names.repeats),
        ranks=round.ranks,
        writes=round.writes,
    )
    write_update(update, lambda to: add_files(round, figures, to, {name: shape for name, _, shape in tensors}))
    if round.ranks.first:
        state.drop_checkpoint(request.state)


@dataclass(frozen=True, kw_only=True)
class StepsTaken:
    """The steps of all replicas that finish the round; the same on every rank."""

    good: int
    """Steps whose loss and gradients were finite."""
    loss: float
    """Mean training loss of those of them that had something to predict, nats per prediction; 0 without any."""
    skipped: int
    """Those that were not good, on average over the replicas, rounded up."""
    scale: LossScale
    """The smallest of the replicas', from which the next round goes on."""


def steps_taken(round: Round) -> StepsTaken:
    """Count the steps of each replica: one that skipped all of its own ends the round as the others do. Called on all
    ranks, which gather."""
    scale, losses = round.engine.scale, [loss for loss in round.progress.losses if loss >= 0]
    mine = [moved(round), len(losses), math.fsum(losses), round.engine.skipped, scale.value, scale.steady]
    found = [one for one in gather(round.ranks, mine if round.counts else None) if one is not None]
    good, counts, sums, skipped, values, steady = zip(*found, strict=True)
    value, steps = min(zip(values, steady, strict=True))
    return StepsTaken(
        good=sum(good),
        loss=math.fsum(sums) / max(1, sum(counts)),
        skipped=math.ceil(sum(skipped) / len(found)),
        scale=LossScale(adapts=scale.adapts, value=value, steady=steps),
    )


def moved(round: Round) -> int:
    """Steps of this round that this rank's replica has taken and not skipped, those before an interruption included."""
    return round.progress.done - round.engine.skipped


def every_step_skipped(scale: LossScale, steps: int) -> str:
    """Why a round has no update in which no step had a finite loss and a finite gradient."""
    if scale.adapts:
        return (
            f"every one of the round's {steps} steps was skipped: gradients overflowed float16, and lowered the loss "
            f"scale to {scale.value:g}, from which the next round goes on; take more steps a round (training.steps), "
            "or train in bfloat16 or float32 (training.compute_dtype)"
        )
    return (
        f"every one of the round's {steps} steps was skipped: no loss or gradient was finite; lower "
        "training.learning_rate, or clip (training.clip_norm), or train in float32 (training.compute_dtype)"
    )


def add_files(round: Round, figures: RoundFigures, directory: Path, sent: dict[str, tuple[int, ...]]) -> None:
    """What an update holds beside its tensors: the report, and the moments that facilities average.

    `sent`: shapes of its tensors.
    """
    reports.write(directory, report_of(round, figures))
    request, training = round.request, round.request.training
    steps = round.progress.optimizer_steps
    if steps == 0 or not training.sends_moments(request.round):
        return
    if request.settings.masking is None:  # else every facility holds back the same, and all must send alike
        sent = trained_whole(sent, training.lora)
    leaving = Leaving(
        state=request.state / f"round-{request.round}",
        sent=sent,
        federated=request.federated,
        steps=steps,
        before=max(0, steps - moved(round)),
    )
    if training.optimizer_state == "shared":
        second_moments.write_outgoing(directory, leaving, training, held_in_memory(round))
    if training.travelling_moments:
        moments.write_outgoing(directory, leaving, training)


def take_walk(round: Round) -> drift.DriftReport | None:
    """Make this round's walk of what was trained; None where drift is not corrected, or the walk has no beginning."""
    correction, received = round.drift, round.inputs.received
    if correction is None or correction.rates == 0:
        return None
    if not all(is_in(name, received, round.conversion) for name in round.engine.assembly.shapes):
        log.info("drift: adapters that begin in this round have no walk")
        return None
    with agree_on_failure(round.ranks):
        correction.finish(round.request, received, round.conversion)
    round.sync_vectors |= {KIND: correction.vector}
    found = gather(round.ranks, [correction.squares, correction.walked] if round.writes else [0.0, 0.0])
    return correction.report(*(math.fsum(column) for column in zip(*found, strict=True)))


def held_in_memory(round: Round) -> dict[str, torch.Tensor]:
    """The second moments, where one rank holds them all and has written them to the state."""
    if round.ranks.world > 1:
        return {}
    return second_moments.held_whole(state.moments_of(round.engine.optimizer, round.engine.parts))


def save_state(round: Round, scale: LossScale) -> None:
    """Write `round-N` of the state directory; `scale`: what the next round begins with in float16."""
    request, settings, training = round.request, round.request.settings, round.request.training
    kept = training.keep_optimizer
    message = state.RoundState(
        federation=settings.federation,
        facility=settings.facility,
        seed=settings.seed,
        round=request.round,
        position=round.progress.position,
        optimizer_steps=round.progress.optimizer_steps if kept else 0,
        sync=sorted(round.sync_vectors.keys() - {KIND}) if kept else [],
        optimizer=training.optimizer,
        betas=[training.beta1, training.beta2],
        loss_scale=scale.value if scale.adapts else 0.0,
        steady=scale.steady,
    )
    state.save_state(
        request.state,
        message,
        round.engine,
        vectors=round.sync_vectors,
        writes=round.writes,
        needed=round.drift.since if round.drift is not None else None,
    )


@dataclass(frozen=True, kw_only=True)
class RoundFigures:
    """What `report.json` says of a trained round that no rank knows alone."""

    sequences: int
    """Blocks trained on by all replicas, those that were lost included."""
    tokens: int
    seconds: float
    """Of training, in all jobs of the round; loading, evaluating and saving left out."""
    training_loss: float
    """Nats per prediction, mean over the steps taken; `WITHHELD` where training is private."""
    peak_memory_bytes: int
    """Of the rank that needed most."""
    devices: list[str]
    details: dict[str, Any]


def measure(round: Round, taken: StepsTaken, walked: drift.DriftReport | None) -> RoundFigures:
    """Gather the figures of all ranks. Called on all of them."""
    setup, inputs, training = round.setup, round.inputs, round.request.training
    shape, engine, ranks = setup.layout.shape, round.engine, round.ranks
    counted = gather(ranks, round.progress.sequences if round.counts else 0)
    sequences = sum(counted) + sum(one.blocks_trained for one in round.lost)
    seconds = round.progress.seconds_before + round.times.trained - round.times.evaluated
    here = {
        "rank": ranks.rank,
        "device": device_name(ranks.device),
        "peak_memory_bytes": account.peak_memory_bytes(ranks),
        "predicted_memory_bytes": engine.predicted_memory_bytes,
        "seconds": account.rounded_seconds(round.clock.seconds),
    }
    per_rank = gather(ranks, here)
    details = account.report_details(
        engine.assembly,
        setup.layout,
        inputs.config,
        seconds=seconds,
        positions=sequences * inputs.positions,
        per_rank=per_rank,
        given_peak=training.peak_flops,
    )
    details[reports.TASK] = inputs.dataset.manifest.task
    details |= reports.accuracies(received=round.progress.accuracy_received, returned=round.accuracy_returned)
    details |= {
        "tokens_per_second_steady": account.steady_tokens_per_second(
            round.step_ends, shape.batch_sequences * inputs.block_tokens
        ),
        reports.PREDICTED_MEMORY: max(one["predicted_memory_bytes"] for one in per_rank),
        "sync": round.sync_report,
        reports.STEPS_SKIPPED: taken.skipped,
        "interruptions": round.progress.interruptions,
        "attention": {"name": inputs.attention.name, "reason": inputs.attention.reason},
        "loss": setup.head.reason,
    }
    if round.private is None:
        details[loss_curve.KEY] = loss_curve.loss_curve(round.progress.losses)
    else:
        details[DETAILS] = round.private.details()
    if round.lost:
        details[lost_replicas.KEY] = [one.to_json() for one in round.lost]
    if walked is not None:
        details[drift.KEY] = walked.to_json()
    return RoundFigures(
        sequences=sequences,
        tokens=sequences * inputs.block_tokens,
        seconds=seconds,
        training_loss=WITHHELD if round.private else taken.loss,
        peak_memory_bytes=max(one["peak_memory_bytes"] for one in per_rank),
        devices=sorted({one["device"] for one in per_rank}),
        details=details,
    )


def report_of(round: Round, figures: RoundFigures) -> reports.Report:
    """`report.json` of a trained round."""
    request, settings, times, progress = round.request, round.request.settings, round.times, round.progress
    return reports.Report(
        federation=settings.federation,
        facility=settings.facility,
        round=request.round,
        samples=figures.sequences,
        tokens=figures.tokens,
        steps=progress.done,
        loss_received=progress.loss_received,
        loss_returned=round.loss_returned,
        perplexity_received=perplexity(progress.loss_received),
        perplexity_returned=perplexity(round.loss_returned),
        training_loss=figures.training_loss,
        tokens_per_second=figures.tokens / figures.seconds,
        seconds=reports.Seconds(
            load=times.loaded - request.began,
            train=figures.seconds,
            save=time.perf_counter() - times.evaluated_again,
            evaluate=times.evaluated - times.loaded + times.evaluated_again - times.trained,
        ),
        peak_memory_bytes=figures.peak_memory_bytes,
        seed=settings.seed,
        position=progress.position,
        ranks=round.ranks.world,
        devices=figures.devices,
        versions=account.versions(),
        details=figures.details,
    )
