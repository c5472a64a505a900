"""Whatever settings stand beside each other: a federation is refused before it begins, or it ends; in the same bits
where its jobs are interrupted after every step, and all that ended well is run again."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.archive.rewind import ASIDE
from coordinator.config.federation import read_federation
from facility.exchange.errors import ConfigurationError
from tests.rounds.by_steps import Refused
from tests.rounds.drawn import Drawn, draw, of_a_kind, under_masks, with_late
from tests.rounds.drawn_changes import Edit, Edited, draw_edits, refusal_of

EDITED = "edited between rounds"
PAUSED = {"limits": {"stop_after": 1}}
CHANGES: dict[str, tuple[Callable[[Drawn, int], Drawn], str, float]] = {
    "blocks of tokens": (lambda drawn, seed: drawn, "10:17", 0.15),
    "families and tasks": (of_a_kind, "10:17", 0.15),
    "late updates": (with_late, "1:8", 0.15),
    "secure aggregation": (under_masks, "10:14", 0.3),
    EDITED: (lambda drawn, seed: drawn, "34:37", 0.15),
    f"families and tasks, {EDITED}": (of_a_kind, "324:326", 0.15),
    f"secure aggregation, {EDITED}": (under_masks, "312:313", 0.15),
}
"""What is drawn beside settings; the seeds, for which `CROSSFED_DRAWN=1000:1200` names others; and of those drawn, such
as are run: fewer would mean that next to nothing is looked at."""


def refused(drawn: Drawn, root: Path) -> str:
    """Why federation.yml or `crossfed check` refuses it; nothing where neither does."""
    try:
        federation = read_federation(drawn.write(root))
    except ConfigurationError as error:
        return str(error)
    return refusal_of(federation, drawn.task, drawn.names)


def ended(drawn: Drawn, root: Path, edits: list[Edit]) -> None:
    """It runs to its end, twice in the same bits where nothing of it is left to chance."""
    file = drawn.write(root / "quiet")
    quiet = Edited(file=file, absent=drawn.absent, late=drawn.late, edits=[*edits])
    try:
        stopped = quiet.run()
    except Refused as error:
        stopped = str(error)
    rewound = "was answered for another weighted sum"  # facilities answer for a round once
    told = ("0 sound updates", "1 sound update", "divergence", "above the best", rewound)
    assert not stopped or any(reason in stopped for reason in told), stopped
    again = drawn.masked and any(edit.back is not None for edit in edits)  # masked anew, to within a rounding
    if stopped or again or not all(one.same_every_time for one in (drawn, *(edit.to for edit in edits))):
        return
    file = drawn.write(root / "paused", **PAUSED)
    paused = Edited(file=file, absent=drawn.absent, late=drawn.late, twice=True, edits=[*edits], more=PAUSED)
    assert not paused.run() and any("the same command resumes here" in text for text in paused.said)
    assert paused.refusals == quiet.refusals, (paused.refusals, quiet.refusals)
    these, those = of_rounds(paused.digests()), of_rounds(quiet.digests())
    differ = sorted(name for name in {*these, *those} if these.get(name) != those.get(name))
    assert not differ, differ


def of_rounds(digests: dict[str, str]) -> dict[str, str]:
    """Without what a rewind set aside, whose folder is named by the time of day."""
    return {name: digest for name, digest in digests.items() if not name.startswith(ASIDE)}


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
            ended(drawn, tmp_path / str(seed), draw_edits(drawn, seed) if what.endswith(EDITED) else [])
        except (AssertionError, Refused) as error:
            raise AssertionError(f"the federation of seed {seed}, {drawn}: {error}") from error
    assert run >= least * len(between), run
