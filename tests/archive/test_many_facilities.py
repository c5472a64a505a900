"""Tables of many facilities stay short, and whoever needs attention is in them by name."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from coordinator.archive.summary import MOST_ROWS, table
from coordinator.engine.live import FacilityState, Snapshot, live_lines, live_table


def printed(renderable: Any) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def row(number: int, **more: Any) -> dict[str, Any]:
    plain = {"facility": f"site{number}", "round": 0, "status": "ok", "reason": "", "tokens": 10, "seconds": 2.0}
    return plain | {"weight": 0.25, "perplexity_received": 8.0, "perplexity_returned": 4.0} | more


def rounds(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"rounds": [{"round": 0, "facilities": rows, "global_perplexity": 3.5}], "final_evaluation": rows}


@pytest.mark.parametrize("count", [1, MOST_ROWS])
def test_few_are_listed_one_by_one(count: int):
    text = printed(table(rounds([row(number) for number in range(count)])))
    assert all(f" site{number} " in text for number in range(count)) and "medians" not in text


@pytest.mark.parametrize("odd", [0, 3])
def test_of_many_only_those_that_need_attention_are_listed(odd: int):
    rows = [row(number, status="absent", reason="its node was lost") for number in range(odd)]
    rows += [row(number) for number in range(odd, 256)]
    text = printed(table(rounds(rows)))
    assert len(text.splitlines()) < 20 and f"{256 - odd} facilities" in text and "3.500" in text
    assert all(f" site{number} " in text for number in range(odd)) and " site200 " not in text
    assert f"{10 * (256 - odd):,}" in text and text.count("its node was lost") == 2 * odd


def test_a_run_of_many_shows_who_is_out_and_who_is_last():
    at_work = {
        f"at{number}": FacilityState(state="training", stage="training", seconds_left=number) for number in range(90)
    }
    queued = {f"in{number}": FacilityState(state="queued (job 7)") for number in range(60)}
    out = {"gone": FacilityState(state="left no update: its node was lost")}
    facilities = at_work | queued | out
    snapshot = Snapshot(federation="f", heading="round 0", coordinator="waits", time=0.0, facilities=facilities)
    text, lines = printed(live_table(snapshot, 5.0)), live_lines(snapshot, 5.0)
    assert "85 facilities" in text and "60 facilities" in text and " gone " in text
    assert all(f" at{number} " in text for number in range(85, 90)) and " at84 " not in text
    assert len(lines) == 8 and "round 0: 60 facilities: queued" in lines
