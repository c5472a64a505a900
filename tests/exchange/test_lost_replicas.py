"""What a report says of lost replicas reaches the coordinator's table and page, and can harm neither."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordinator.archive.rounds import FacilityRow
from coordinator.archive.table import table
from coordinator.report.data import _failures as failures
from facility.exchange.errors import ManifestError
from facility.exchange.messages import report
from facility.exchange.messages.lost_replicas import KEY, LostReplica, lost_in, note_on

LOST = LostReplica(replica=1, step=7, blocks_trained=14, blocks_not_trained=26, reason="its connection closed")


def report_with(details: dict[str, Any]) -> report.Report:
    return report.Report(
        federation="f",
        facility="north",
        round=0,
        samples=1,
        tokens=1,
        steps=1,
        loss_received=1.0,
        loss_returned=1.0,
        perplexity_received=2.7,
        perplexity_returned=2.7,
        training_loss=1.0,
        details=details,
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    report.write(tmp_path, report_with({KEY: [LOST.to_json()]}))
    assert lost_in(report.read_report(tmp_path)) == [LOST]
    assert lost_in(report_with({})) == [] and note_on(report_with({})) == ""


@pytest.mark.parametrize(
    "value",
    [
        "all",
        [7],
        [{"replica": 1}],
        [LOST.to_json() | {"replica": -1}],
        [LOST.to_json() | {"blocks_trained": 1e300}],
        [LOST.to_json() | {"more": 1}],
        [LOST.to_json()] * 10_001,
    ],
)
def test_a_malformed_list_is_told_and_refuses_nothing(value: Any) -> None:
    odd = report_with({KEY: value})
    with pytest.raises(ManifestError):
        lost_in(odd)
    assert note_on(odd).startswith("what it says of lost replicas cannot be read")


def test_the_table_and_the_report_say_which_replica_was_lost_when() -> None:
    hostile = dataclasses.replace(LOST, reason="[red]two\nlines\x1b[0m")
    rows = [
        dataclasses.asdict(
            FacilityRow(round=0, facility=name, status="ok", note=note_on(report_with({KEY: [lost.to_json()]})))
        )
        for name, lost in (("north", LOST), ("south", hostile))
    ]
    entry = {"round": 0, "attempts": 1, "global_perplexity": None, "global_perplexity_over": [], "facilities": rows}
    shown = io.StringIO()
    Console(file=shown, width=400).print(table({"rounds": [entry], "final_evaluation": []}))
    said = "replica 1 lost after step 7 (its connection closed): 14 of its blocks trained, 26 not"
    assert said in shown.getvalue() and "[red]two lines" in shown.getvalue() and "\x1b" not in shown.getvalue()
    north, south = failures(rows, {"rounds": [entry], "final_evaluation": []}, [])
    assert (north["facility"], north["status"], north["reason"]) == ("north", "replica lost", said)
    assert "[red]two lines?[0m" in south["reason"]
