"""Whatever settings stand beside each other: a federation is refused before it begins, or it ends; in the same bits
where its jobs are interrupted after every step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coordinator.config.federation import read_federation
from coordinator.preflight.coordinator import check_here
from coordinator.preflight.fitting import check_fitting
from facility.exchange.errors import ConfigurationError
from tests.rounds.by_steps import BySteps, Refused
from tests.rounds.drawn import Drawn, draw

SEEDS = range(*map(int, os.environ.get("CROSSFED_DRAWN", "10:30").split(":")))
"""`CROSSFED_DRAWN=1000:1200` draws others."""
LEAST_RUN = 0.15
"""Of those drawn, such as are run: fewer would mean that next to nothing is looked at."""


def refused(drawn: Drawn, root: Path) -> str:
    """Why federation.yml or `crossfed check` refuses it; nothing where neither does."""
    try:
        federation = read_federation(drawn.write(root))
    except ConfigurationError as error:
        return str(error)
    rows, model = check_here(federation)
    if model is not None:
        rows += check_fitting(federation, dict.fromkeys(drawn.names, "causal-lm"))
    return "\n".join(row.found for row in rows if row.verdict == "fail")


def ended(drawn: Drawn, root: Path) -> None:
    """It runs to its end, twice in the same bits where nothing of it is left to chance."""
    quiet = BySteps(file=drawn.write(root / "quiet"), absent=drawn.absent)
    stopped = quiet.run()
    told = ("0 sound updates", "divergence", "above the best")
    assert not stopped or any(reason in stopped for reason in told), stopped
    if stopped or not drawn.same_every_time:
        return
    paused = BySteps(file=drawn.write(root / "paused", limits={"stop_after": 1}), absent=drawn.absent)
    assert not paused.run() and any("the same command resumes here" in text for text in paused.said)
    assert paused.digests() == quiet.digests()


@pytest.mark.slow
def test_any_settings_beside_any_others_are_refused_before_a_job_begins_or_come_to_an_end(tmp_path: Path):
    run = 0
    for seed in SEEDS:
        drawn = draw(seed)
        if refused(drawn, tmp_path / f"{seed}-looked-at"):
            continue
        run += 1
        try:
            ended(drawn, tmp_path / str(seed))
        except (AssertionError, Refused) as error:
            raise AssertionError(f"the federation of seed {seed}, {drawn}: {error}") from error
    assert run >= LEAST_RUN * len(SEEDS), run
