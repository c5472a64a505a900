"""Archives of made-up federations of any size, with the events that such a run leaves."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

from coordinator.archive.journal import Journal
from coordinator.archive.rounds import Archive, FacilityRow, RoundFile
from facility.exchange.files.durable import write_json

BEGIN = 1_790_000_000.0
STAGES = (("loading", 20.0), ("evaluating", 10.0), ("training", 300.0), ("evaluating", 10.0), ("saving", 5.0))


def made_archive(root: Path, *, facilities: int, rounds: int, events: bool = True, half: bool = False) -> Archive:
    """`half`: the last round is under way."""
    random_numbers = random.Random(f"{facilities} {rounds}")
    archive = Archive(root)
    root.mkdir(parents=True, exist_ok=True)
    journal = Journal(root)
    names = [f"facility-{number:02d}" for number in range(facilities)]
    steps = {name: [random_numbers.gauss(0, 1) for _ in range(8)] for name in names}
    loss, now = 4.0, BEGIN

    def note(kind: str, at: float, **rest: Any) -> None:
        if events:
            journal.append(kind, time=at, **rest)

    note("run_started", now, rounds=0)
    for number in range(rounds + half):
        note("round_started", now, round=number)
        ends = []
        rows = []
        for place, name in enumerate(names):
            end, row = _job(random_numbers, note, name, number, place, now, loss)
            ends.append(end)
            rows.append(row)
        if number == rounds:
            break
        now = max(ends) + 5
        note("averaging", now, round=number)
        now += 30
        note("averaged", now, round=number, decision="go on")
        loss -= 0.6 / (number + 1)
        sound = [row for row in rows if row.status == "ok"]
        record = RoundFile(
            round=number,
            facilities=[dataclasses.replace(row, weight=1 / len(sound) if row.status == "ok" else 0.0) for row in rows],
            global_loss=loss + 0.3,
            global_loss_over=[row.facility for row in sound],
            decision="go on",
            finished="2026-09-21T12:00:00+00:00",
            model_sha256=f"{number:064x}",
            aggregation=_aggregation(sound, steps, number),
        )
        archive.round_directory(number).mkdir()
        write_json(archive.round_directory(number) / "round.json", dataclasses.asdict(record))
    if not half:
        note("run_ended", now + 2, code=0, reason="done")
    return archive


def _job(
    numbers: random.Random, note: Any, name: str, number: int, place: int, now: float, loss: float
) -> tuple[float, FacilityRow]:
    """One facility's round: queue, job, transfers; returns when its update is there, and its row."""
    queue, speed = numbers.expovariate(1 / 120), 1 + numbers.random()
    note("sent", now + 12, facility=name, round=number, what="model", bytes=2_000_000_000, seconds=6 + place % 5)
    at = now + 14
    note("queued", at, facility=name, round=number, job=str(1000 + place))
    at += queue
    note("started", at, facility=name, round=number, job=str(1000 + place))
    for stage, seconds in STAGES:
        note("stage", at + 1, facility=name, round=number, stage=stage)
        at += seconds * speed
    note("trained", at, facility=name, round=number, code=0)
    phases = {"load": 20 * speed, "train": 300 * speed, "evaluate": 20 * speed, "save": 5 * speed}
    row = FacilityRow(
        round=number,
        facility=name,
        status="ok",
        tokens=1_000_000 + 1000 * place,
        seconds=sum(phases.values()),
        steps=60,
        training_losses=[(6 * part, loss - 0.04 * part + 0.02 * numbers.random()) for part in range(1, 11)],
        phases=phases,
        tokens_per_second=3333 / speed,
        loss_received=loss,
        perplexity_received=math.exp(loss + 0.05 * (place % 9)),
        perplexity_returned=math.exp(loss - 0.4 + 0.05 * (place % 9)),
        sent_bytes=2_000_000_000,
        received_bytes=2_000_000_000,
        moments_bytes=3_000_000,
        ranks=8,
        devices=["NVIDIA A100"],
        versions={"crossfed": "0.1", "torch": "2.13.0"},
        update_sha256=f"{number * 100 + place:064x}",
        usage={"node_seconds": 2 * at, "gpu_seconds": 8.0 * 345 * speed}
        | ({"energy_joules": 4e6 * speed, "energy_source": "sacct"} if place % 3 else {}),
    )
    row = dataclasses.replace(row, usage=row.usage | {"node_seconds": 2 * 345 * speed})
    if (number + place) % 7 == 3:
        reason = "rank 3: torch.OutOfMemoryError: CUDA out of memory <script>alert(1)</script>"
        note("refused", at + 3, facility=name, round=number, reason=reason)
        note("log", at + 3, facility=name, round=number, lines=["Traceback (most recent call last):", reason])
        return at + 3, FacilityRow(
            round=number, facility=name, status="failed", reason=reason, sent_bytes=2_000_000_000
        )
    note("transferred", at + 25, facility=name, round=number, what="update", bytes=2_000_000_000, seconds=20.0)
    note("verified", at + 30, facility=name, round=number)
    return at + 30, row


def _aggregation(sound: list[FacilityRow], steps: dict[str, list[float]], number: int) -> dict[str, Any]:
    def cosine(one: list[float], two: list[float]) -> float:
        return sum(a * b for a, b in zip(one, two, strict=True)) / (math.hypot(*one) * math.hypot(*two))

    mean = [sum(steps[row.facility][axis] for row in sound) for axis in range(8)]
    return {
        "rule": "mean",
        "outer": "nesterov",
        "step_norm": 1.5,
        "participants": [
            {
                "facility": row.facility,
                "weight": 1 / len(sound),
                "norm": math.hypot(*steps[row.facility]),
                "cosine_to_mean": cosine(steps[row.facility], mean),
                "cosines": {
                    other.facility: cosine(steps[row.facility], steps[other.facility])
                    for other in sound
                    if other.facility != row.facility
                },
            }
            for row in sound
        ],
        "suspects": {sound[0].facility: "its step is 5.2 times as long as the median"} if number == 1 else {},
        "quarantined": {},
        "dropped": {},
    }
