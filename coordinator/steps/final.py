"""After the last round: the final evaluation, then the comparison of models."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from coordinator.archive.rounds import Archive, FacilityRow, RoundFile
from coordinator.archive.sweep import sweep_round
from coordinator.comparison.phases import Answers, following, take
from coordinator.config.settings import CoordinatorSettings
from coordinator.rounds.acceptance import unrecorded_changes
from coordinator.steps.arrived import Arrived, CollectedRound
from coordinator.steps.global_loss import global_losses, losses_by_model, plausible, renewed_in
from coordinator.steps.next_round import NextRound
from coordinator.steps.rows import rows_of
from facility.exchange.messages.manifest import bytes_of, read_manifest

log = logging.getLogger(__name__)


def close_final(round: CollectedRound) -> NextRound:
    """After the last round: the final evaluation, then what the comparison of models asks for."""
    archive, settings, model, arrived = round.archive, round.settings, round.model, round.arrived
    history = archive.history()
    before = history[settings.rounds - 1] if 0 < settings.rounds <= len(history) else None
    rows = rows_of(dataclasses.replace(round, number=settings.rounds), {}, {}, before)
    if read_manifest(model).kind == "model":
        close_evaluation(archive, history, arrived, rows)
    else:
        size = bytes_of(read_manifest(model))
        described = [dataclasses.asdict(dataclasses.replace(row, sent="full", sent_bytes=size)) for row in rows]
        take(archive, settings, model, Answers(updates=arrived.updates, failures=arrived.failures, rows=described))
        sweep_round(Path.cwd(), settings.federation, settings.rounds, but=model)
    return compare_next(archive, settings, model)


def compare_next(archive: Archive, settings: CoordinatorSettings, model: Path) -> NextRound:
    """The next directory of the comparison; the end where there is none."""
    sent = following(archive, settings)
    if sent is None:
        return NextRound(model, settings.rounds, proceed=False)
    return NextRound(sent, settings.rounds, proceed=True)


def close_evaluation(archive: Archive, history: Sequence[RoundFile], arrived: Arrived, rows: list[FacilityRow]) -> None:
    """Note what the facilities found of the final model, which the rounds in `history` made."""
    reported = plausible(losses_by_model([*(entry.facilities for entry in history), rows]))
    renewed = renewed_in(history, unrecorded_changes(archive))
    archive.write_note(
        "evaluation",
        {
            "after_round": len(history) - 1,
            "global_loss": global_losses(reported, renewed)[-1],
            "global_loss_over": sorted(reported[-1]),
            "facilities": [dataclasses.asdict(row) for row in rows],
            "scores": arrived.scores,
        },
    )
    log.info("the final model is evaluated at %d facilities", len(arrived.reports))
