"""The report's section on the correction of drift, and what of a facility's report is believed."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.report.drift import drift
from coordinator.report.markdown import drift as in_markdown
from facility.exchange.messages.drift import KEY, DriftReport, drift_of
from facility.exchange.messages.report import Report


def report_with(told: object) -> Report:
    figures: dict[str, Any] = dict.fromkeys(("samples", "tokens", "steps"), 1)
    figures |= dict.fromkeys(("loss_received", "loss_returned", "training_loss"), 1.0)
    figures |= {"perplexity_received": 2.0, "perplexity_returned": 2.0}
    return Report(federation="f", facility="a", round=0, details={KEY: told}, **figures)


def row(facility: str, round: int, share: float | None, reason: str = "") -> dict[str, Any]:
    told = DriftReport(rates=0.1, corrected=share is not None, share=share or 0.0, reason=reason)
    return {"facility": facility, "round": round, "drift": told.to_json()}


def test_each_facility_by_its_rounds_and_the_reason_of_the_last_that_had_none():
    rows = [row("a", 0, None, "no mean walk"), row("a", 1, 0.75), row("a", 2, 0.5), row("b", 2, None, "| lost")]
    found = drift([*rows, {"facility": "c", "round": 0, "drift": {}}], ["a", "b", "c"])
    assert found == {
        "a": {
            "rounds": 3,
            "corrected": 2,
            "first_share": 0.75,
            "latest_share": 0.5,
            "uncorrected": "round 0: no mean walk",
        },
        "b": {"rounds": 1, "corrected": 0, "first_share": None, "latest_share": None, "uncorrected": "round 2: | lost"},
    }
    text = "\n".join(in_markdown({"drift": found, "chosen": {"drift": ""}}))
    assert "| a | 3 | 2 | 0.750 | 0.500 | round 0: no mean walk |" in text and in_markdown({"drift": {}}) == []


def test_what_a_report_says_comes_back_and_nothing_impossible_does():
    told = DriftReport(rates=0.25, corrected=True, share=0.5, reason="why")
    assert drift_of(report_with(told.to_json())) == told
    assert drift_of(report_with(told.to_json() | {"reason": "a\x1b[2J" + "b" * 999})).reason == "a[2J" + "b" * 296  # type: ignore[union-attr]
    for wrong in (0.0, -1.0, float("nan"), float("inf"), True, "1", None, 1e300):
        assert drift_of(report_with(told.to_json() | {"rates": wrong})) is None


@pytest.mark.parametrize("told", [None, [], "x", {}, {"rates": 1.0}, {"rates": 1.0, "corrected": 1}])
def test_anything_else_counts_as_nothing(told: object):
    assert drift_of(report_with(told)) is None
