"""What was predicted stands beside what was measured, and nothing is invented where either is missing."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.report.predictions import predictions
from facility.exchange.messages.report import PREDICTED_MEMORY, Report, predicted_memory_of


def row(facility: str, round: int, peak: int, predicted: int) -> dict[str, Any]:
    return {"facility": facility, "round": round, "peak_memory_bytes": peak, "predicted_memory_bytes": predicted}


def test_each_facility_by_the_round_in_which_it_needed_most():
    rows = [row("a", 0, 900, 1000), row("a", 1, 1100, 1000), row("b", 0, 500, 0), row("c", 0, 0, 1000)]
    assert predictions(rows, ["a", "b", "c", "d"]) == {
        "a": {"round": 1, "predicted_memory_bytes": 1000, "peak_memory_bytes": 1100, "ratio": 1.1},
        "b": {"round": 0, "predicted_memory_bytes": None, "peak_memory_bytes": 500, "ratio": None},
    }


@pytest.mark.parametrize("told", [-1, 0, True, 1.5, "7", None, 10**30, [1]])
def test_a_figure_that_cannot_be_one_is_none(told: object):
    figures: dict[str, Any] = dict.fromkeys(("samples", "tokens", "steps"), 1)
    figures |= dict.fromkeys(("loss_received", "loss_returned", "training_loss"), 1.0)
    figures |= {"perplexity_received": 2.0, "perplexity_returned": 2.0}
    made = Report(federation="f", facility="a", round=0, details={PREDICTED_MEMORY: told}, **figures)
    assert predicted_memory_of(made) == 0
