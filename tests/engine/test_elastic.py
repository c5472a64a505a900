"""A federation under StreamFlow whose jobs take as many steps as fit until the stated end of their round."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from coordinator.archive.remarks import summary_remarks
from coordinator.archive.rounds import Archive, FacilityRow, RoundFile
from coordinator.archive.summary import summary
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from facility.exchange.messages.manifest import read_manifest
from facility.exchange.messages.steps import end_asked
from facility.rounds.steps import NAME
from tests.engine.engines import streamflow
from tests.federations import write_federation

NAMES, ROUNDS, STEPS, BATCH, LENGTH = ("a", "b"), 4, 8, 32, 16
LAG = 1.0
"""Most seconds from a decision to its file."""


class Decisions:
    """What each job decided, with the time of the file that says so, read while the federation runs."""

    def __init__(self, sites: Path) -> None:
        self.sites, self._over = sites, threading.Event()
        self.found: dict[tuple[str, int], tuple[float, dict[str, Any]]] = {}
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> dict[tuple[str, int], tuple[float, dict[str, Any]]]:
        self._thread.start()
        return self.found

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            for path in self.sites.rglob(NAME):
                with path.open() as opened:  # it is replaced as a whole
                    since, content = os.fstat(opened.fileno()).st_mtime, json.load(opened)
                self.found.setdefault((path.relative_to(self.sites).parts[0], content["round"]), (since, content))


def rows_of(history: list[RoundFile], name: str) -> list[FacilityRow]:
    return [row for entry in history for row in entry.facilities if row.facility == name]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_jobs_take_the_steps_that_fit_until_the_stated_end_and_weigh_by_them(tmp_path: Path):
    path = write_federation(
        tmp_path,
        list(NAMES),
        training={"steps": STEPS, "batch_sequences": BATCH},
        size={"hidden_size": 128, "intermediate_size": 256},  # steps that take a time
        rounds={"count": ROUNDS, "steps": "elastic"},
        keep_rounds=ROUNDS,
        final_evaluation=False,
    )
    federation = read_federation(path)
    write_rendered(federation)
    with Decisions(tmp_path / "sites") as decided:
        result = streamflow(path, tmp_path / "engine", timeout=380)
    assert result.returncode == 0, result.stdout[-4000:]
    archive = Archive(federation.archive_path)
    history = archive.history()
    assert [row.steps for row in history[0].facilities] == [STEPS] * len(NAMES), "nobody was timed yet"
    assert decided.keys() == {(name, number) for name in NAMES for number in range(1, ROUNDS)}
    for number, entry in enumerate(history[1:], start=1):
        assert history[number - 1].next_end > 0, "round.json says when it was to end"
        manifest = read_manifest(archive.model_for(number))
        tokens = {row.facility: row.tokens for row in entry.facilities}
        for row in entry.facilities:
            end = end_asked(manifest, row.facility)
            assert end is not None and (end.least, end.most) == (STEPS // 4, STEPS * 4)
            since, decision = decided[row.facility, number]
            beside = median(decision["beside"]) if decision["beside"] else None
            assert end.steps_from(since, beside) <= row.steps <= end.steps_from(since - LAG, beside)
            assert row.steps == decision["steps"] and end.least <= row.steps <= end.most
            assert row.tokens == row.steps * BATCH * LENGTH
        work = {name: fmean(row.steps / STEPS for row in rows_of(history[: number + 1], name)) for name in NAMES}
        counted = {name: tokens[name] * fmean(work.values()) / work[name] for name in NAMES}
        weights = {row.facility: row.weight for row in entry.facilities}
        assert weights == pytest.approx({name: one / sum(counted.values()) for name, one in counted.items()}), (
            "it weighs by what it did, over what it did in all rounds"
        )
    rows = [row for entry in history for row in entry.facilities]
    taken = {name: [row.steps for row in rows if row.facility == name] for name in NAMES}
    said = ", ".join(f"{name} {min(steps)} to {max(steps)}" for name, steps in taken.items())
    lines = summary_remarks(summary(archive))
    assert f"steps that fitted until the expected end of their round: {said}" in lines
    assert not [line for line in lines if line.startswith("steps from round")], "none were agreed before the queue"
    assert said in result.stdout.replace("\n", " ")
