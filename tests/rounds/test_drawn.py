"""Whatever settings stand beside each other: a federation is refused before it begins, or it ends; in the same bits
where its jobs are interrupted after every step, and all that ended well is run again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.config.federation import read_federation
from coordinator.preflight.coordinator import check_here
from coordinator.preflight.fitting import check_fitting
from facility.exchange.errors import ConfigurationError
from tests.rounds.by_steps import BySteps, Refused
from tests.rounds.drawn import Drawn, draw, of_a_kind, under_masks, with_late

CHANGES: dict[str, tuple[Callable[[Drawn, int], Drawn], str, float]] = {
    "blocks of tokens": (lambda drawn, seed: drawn, "10:30", 0.15),
    "families and tasks": (of_a_kind, "10:24", 0.15),
    "late updates": (with_late, "1:9", 0.15),
    "secure aggregation": (under_masks, "10:16", 0.3),
}
"""What is drawn beside settings; the seeds, for which `CROSSFED_DRAWN=1000:1200` names others; and of those drawn, such
as are run: fewer would mean that next to nothing is looked at."""


def refused(drawn: Drawn, root: Path) -> str:
    """Why federation.yml or `crossfed check` refuses it; nothing where neither does."""
    try:
        federation = read_federation(drawn.write(root))
    except ConfigurationError as error:
        return str(error)
    rows, model = check_here(federation)
    if model is not None:
        rows += check_fitting(federation, dict.fromkeys(drawn.names, drawn.task))
    return "\n".join(row.found for row in rows if row.verdict == "fail")


def ended(drawn: Drawn, root: Path) -> None:
    """It runs to its end, twice in the same bits where nothing of it is left to chance."""
    quiet = BySteps(file=drawn.write(root / "quiet"), absent=drawn.absent, late=drawn.late)
    stopped = quiet.run()
    told = ("0 sound updates", "1 sound update", "divergence", "above the best")
    assert not stopped or any(reason in stopped for reason in told), stopped
    if stopped or not drawn.same_every_time:
        return
    file = drawn.write(root / "paused", limits={"stop_after": 1})
    paused = BySteps(file=file, absent=drawn.absent, late=drawn.late, twice=True)
    assert not paused.run() and any("the same command resumes here" in text for text in paused.said)
    assert paused.digests() == quiet.digests()


@pytest.mark.slow
@pytest.mark.parametrize("what", list(CHANGES))
def test_any_settings_beside_any_others_are_refused_before_a_job_begins_or_come_to_an_end(tmp_path: Path, what: str):
    change, seeds, least = CHANGES[what]
    between = range(*map(int, os.environ.get("CROSSFED_DRAWN", seeds).split(":")))
    run = 0
    for seed in between:
        drawn = change(draw(seed), seed)
        if refused(drawn, tmp_path / f"{seed}-looked-at"):
            continue
        run += 1
        try:
            ended(drawn, tmp_path / str(seed))
        except (AssertionError, Refused) as error:
            raise AssertionError(f"the federation of seed {seed}, {drawn}: {error}") from error
    assert run >= least * len(between), run
