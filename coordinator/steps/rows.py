"""What the round's file says of each facility that answered."""

from __future__ import annotations

import dataclasses

from coordinator.aggregation.rebase import MADE
from coordinator.archive.privacy import reported_privacy
from coordinator.archive.rounds import BUSY, CARRIED, UNREACHED, FacilityRow, RoundFile
from coordinator.config.settings import CoordinatorSettings
from coordinator.rounds.unasked import objection_to
from coordinator.steps.arrived import CollectedRound
from coordinator.steps.send import Outgoing, outgoing
from facility.exchange.checkpoints.companions import MOMENTS
from facility.exchange.checkpoints.delta_decoding import TRAVELLED
from facility.exchange.messages.dataset_card import dataset_of
from facility.exchange.messages.drift import drift_of
from facility.exchange.messages.evaluation import scores_of
from facility.exchange.messages.loss_curve import loss_curve_of
from facility.exchange.messages.lost_replicas import note_on
from facility.exchange.messages.manifest import KEEPS, Manifest, bytes_of, manifest_if_any, read_manifest
from facility.exchange.messages.report import (
    MOST_COUNT,
    Failure,
    accuracies_of,
    predicted_memory_of,
    task_reported,
)
from facility.exchange.messages.strict_json import HEX
from facility.exchange.messages.usage import usage_of

MOST_DEVICES = 16
"""Names of devices kept of a facility's report."""


def rows_of(
    round: CollectedRound, weights: dict[str, float], left_out: dict[str, str], before: RoundFile | None
) -> list[FacilityRow]:
    """A row for every facility that answered, by name. `weights`: shares in the next model; `left_out`: facilities
    whose updates are not in it, with the reason. `before`: the round before; None where there is none."""
    busy = {row.facility for row in before.facilities if row.reason == CARRIED} if before else set()
    rows = [
        _row(round, name, weights, left_out, _sent(round, name, busy))
        for name in sorted({*round.arrived.reports, *round.arrived.failures})
    ]
    return [_as_asked(row, round.settings) for row in rows]


def _sent(round: CollectedRound, name: str, busy: set[str]) -> Outgoing | None:
    """What the facility was sent in the round; None where its job of an earlier round went on, or it was not reached.

    `busy`: facilities whose job of an earlier round went on as this one began. Such a one has begun anew in this round
    if its update is of this round.
    """
    report, failure = round.arrived.reports.get(name), round.arrived.failures.get(name)
    of_now = report is not None and report.round == round.number
    if (report is not None and not of_now) or (name in busy and not of_now):
        return None
    if failure is not None and failure.kind == "late" and failure.reason in (BUSY, UNREACHED):
        return None
    return outgoing(round.archive, round.settings, name, round.number)


def _as_asked(row: FacilityRow, settings: CoordinatorSettings) -> FacilityRow:
    """The row without scores that nobody asked for: a sentence takes their place, and is logged."""
    if not row.scores:
        return row
    scores, where = row.scores.get("results", []), f"round {row.round}"
    objection = objection_to(settings, row.facility, scores, round=row.round - row.staleness, where=where)
    return dataclasses.replace(row, scores={}, unasked=objection) if objection else row


def _row(
    round: CollectedRound, name: str, weights: dict[str, float], left_out: dict[str, str], sent: Outgoing | None
) -> FacilityRow:
    number, arrived = round.number, round.arrived
    row = FacilityRow(
        round=number,
        facility=name,
        status="ok",
        sent=str(sent or ""),
        sent_bytes=sent.bytes if sent else 0,
        moments_bytes=sent.moments_bytes if sent else 0,
    )
    if (update := arrived.updates.get(name)) is not None:
        row = _with_manifest(row, read_manifest(update), late=arrived.reports[name].round < number)
    elif (dropped := arrived.dropped_updates.get(name)) and (manifest := manifest_if_any(dropped)) is not None:
        row = _with_manifest(row, manifest, late=False)  # what is wrong with it may be its manifest
    if name in arrived.failures or name in left_out:
        failure = arrived.failures.get(name) or Failure(
            facility=name, round=number, reason=left_out[name], kind="refused"
        )
        report = arrived.reports.get(name) or arrived.dropped_reports.get(name)
        spent = reported_privacy(report) if report is not None else {}  # whatever became of the update
        return dataclasses.replace(row, status=failure.kind, reason=failure.reason, privacy=spent)
    report = arrived.reports[name]
    late = number - report.round
    received, returned = accuracies_of(report)
    return dataclasses.replace(
        row,
        note=note_on(report),
        privacy=reported_privacy(report),
        drift=drift.to_json() if (drift := drift_of(report)) is not None else {},
        staleness=late,
        weight=weights.get(name, 0.0),
        task=task_reported(report),
        tokens=report.tokens,
        samples=report.samples,
        steps=report.steps,
        seconds=report.seconds.load + report.seconds.train + report.seconds.evaluate + report.seconds.save,
        tokens_per_second=report.tokens_per_second,
        training_losses=loss_curve_of(report),
        phases=dataclasses.asdict(report.seconds),
        ranks=report.ranks,
        devices=report.devices[:MOST_DEVICES],
        peak_memory_bytes=report.peak_memory_bytes,
        predicted_memory_bytes=predicted_memory_of(report),
        versions=report.versions,
        # What a late one received was the model of an earlier round: no figure of this one's.
        loss_received=None if late else report.loss_received,
        late_loss=report.loss_received if late else None,
        loss_returned=report.loss_returned,
        perplexity_received=None if late else report.perplexity_received,
        perplexity_returned=report.perplexity_returned,
        accuracy_received=None if late else received,
        accuracy_returned=returned,
    )


def _with_manifest(row: FacilityRow, manifest: Manifest, *, late: bool) -> FacilityRow:
    """The row with what an update's manifest says. `late`: it was moved to the present model since it came."""
    return dataclasses.replace(
        row,
        received_bytes=_travelled(manifest),
        moments_bytes=row.moments_bytes + bytes_of(manifest, MOMENTS),
        update_sha256=(_digest(manifest.extra.get(MADE)) if late else "") or manifest.content_sha256,
        usage=usage_of(manifest),
        scores=scores_of(manifest),
        dataset=dataset_of(manifest),
        holds=_digest(manifest.extra.get(KEEPS)),
    )


def _travelled(manifest: Manifest) -> int:
    """Bytes that came, also where a message was decoded here or a late update was moved; whatever else a facility says
    there is not read."""
    claimed = manifest.extra.get(TRAVELLED)
    return claimed if type(claimed) is int and 0 < claimed <= MOST_COUNT else bytes_of(manifest)


def _digest(value: object) -> str:
    return value if isinstance(value, str) and HEX.fullmatch(value) else ""
