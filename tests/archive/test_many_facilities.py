"""Tables of many facilities stay short, and whoever needs attention is in them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from coordinator.archive.many import MOST_ROWS
from coordinator.archive.remarks import summary_remarks
from coordinator.archive.table import table, to_show
from coordinator.config.federation import read_federation
from coordinator.engine.live import FacilityState, Snapshot, live_lines, live_table
from coordinator.engine.stuck_jobs import lines_of
from coordinator.preflight.check import show_rows
from coordinator.preflight.check import to_show as to_show_rows
from coordinator.preflight.row import fail, ok
from coordinator.report.explain import explain_round
from tests.federations import write_federation
from tests.report.made import made_archive


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


def test_many_out_for_one_reason_are_one_line_and_other_reasons_are_counted():
    rows = [row(n, status="failed", reason=f"rank {n}: site{n} has no memory") for n in range(100)]
    rows += [row(n, status="absent", reason="its node was lost") for n in range(100, 106)]
    rows += [row(n, status="refused", reason="x" * (n - 105)) for n in range(106, 146)]
    alone, together = to_show(rows + [row(n) for n in range(146, 256)])
    assert len(together) == 110 and len(alone) == MOST_ROWS + 1
    assert alone[0]["facility"] == "site0, site1, site2 and 97 more" and alone[0]["tokens"] == 1000
    assert alone[1]["facility"] == "site100, site101, site102 and 3 more" and "status --json" in alone[-1]["reason"]
    text = printed(table(rounds(rows)))
    assert "97 more" in text and "site0 has no memory" in text


def test_remarks_of_many_are_sums_and_those_that_need_attention():
    budget = {"delta": 1e-5, "unit": "example", "steps": 10, "noise_multiplier": 1.0}
    budget |= {"spent_on_validation": 1.0, "validation_deviation": 0.1}
    rows = [row(n, privacy=budget | {"epsilon": 8.0, "spent": n / 64}) for n in range(256)]
    entry = {"round": 0, "facilities": rows, "next_steps": {f"site{n}": 10 + n for n in range(256)}}
    waited = {f"site{n}": 36.0 * n for n in range(256)}
    data = {"rounds": [entry | {"next_steps_reason": "moved by 10 %"}], "waited_node_seconds": waited}
    text = "\n".join(summary_remarks(data))
    assert len(text.splitlines()) == 6 and "privacy of site255: epsilon 3.98 of 8" in text and "253 more" in text
    assert "256 facilities 10 (site0) to 265 (site255)" in text
    assert f"256 facilities: {sum(waited.values()) / 3600:.3g} node-hours" in text and "most: site255 2.55" in text
    data["rounds"][0] |= {"next_end": 60.0, "facilities": [one | {"steps": 7 + n} for n, one in enumerate(rows)]}
    text = "\n".join(summary_remarks(data))
    assert "expected end of their round: 256 facilities 7 to 262" in text
    assert "(moved by" not in text, "each job takes what fits: a plan that was made for equal ends is not a fact"


def test_a_run_of_many_that_are_out_shows_each_reason_once():
    out = {f"no{n}": FacilityState(state=f"left no update: no{n} lost rank {n}") for n in range(200)}
    out |= {f"far{n}": FacilityState(state="refused: another model") for n in range(30)}
    snapshot = Snapshot(federation="f", heading="round 0", coordinator="waits", time=0.0, facilities=out)
    lines = live_lines(snapshot, 5.0)
    assert lines[0] == "round 0: 200 facilities (no0, no1, no2 and 197 more): left no update: no0 lost rank 0"
    assert len(lines) == 2 and "30 facilities" in printed(live_table(snapshot, 5.0))


def test_checks_of_many_are_a_line_for_what_all_pass_and_one_for_each_thing_to_do():
    rows = [ok("coordinator", "disk", "enough")]
    for n in range(256):
        rows += [ok(f"site{n}", "python", f"3.{n}")]
        done = fail(f"site{n}", "dataset", f"{n} blocks at site{n}", f"prepare site{n} again")
        rows += [done if n % 2 else ok(f"site{n}", "dataset", "there")]
    shown = to_show_rows(rows)
    assert [row.subject for row in shown] == [
        "coordinator",
        "256 facilities",
        "128 facilities",
        "128 facilities: site1, site3, site5 and 125 more",
    ]
    assert shown[-1].fix == "prepare site1 again" and shown[1].found == "site0: 3.0"
    told: list[str] = []
    assert show_rows(rows, as_json=True, write=told.append) == 1 and told[0].count('"subject"') == len(rows)
    assert to_show_rows(rows[: 2 * 10]) == rows[: 2 * 10]


def test_jobs_of_many_that_wait_for_the_same_are_one_line():
    jobs = [
        {"facility": f"site{n}", "job": str(n), "state": "PENDING", "reason": "Priority", "do": ""} for n in range(99)
    ]
    stuck = {"facility": "odd", "job": "7", "state": "PENDING", "reason": "AssocGrpGRES", "do": "-> ask for fewer"}
    assert lines_of([*jobs, stuck]) == [
        "site0 0 PENDING Priority (and 98 more jobs alike: site1, site2, site3 and 95 more)",
        "odd 7 PENDING AssocGrpGRES -> ask for fewer",
    ]
    assert lines_of([stuck]) == ["odd 7 PENDING AssocGrpGRES -> ask for fewer"]


def test_a_round_of_many_is_explained_once_for_each_reason(tmp_path: Path):
    made_archive(tmp_path / "archive", facilities=256, rounds=2, half=True)
    file = write_federation(tmp_path, ["facility-00", "facility-01"])
    described = yaml.safe_load(file.read_text())
    one = described["facilities"][0]
    described["facilities"] = [one | {"name": f"facility-{n:02d}"} for n in range(256)]
    file.write_text(yaml.safe_dump(described | {"rounds": 3}))
    for number in (0, 2):
        text = explain_round(read_federation(file), number)
        assert len(text.splitlines()) < 12 and text.count("What to do") == 1
        assert " more: facility-" in text and ("219 facilities" in text or "220 facilities" in text)
