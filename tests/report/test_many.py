"""The report of many facilities stays short: sums, and by name who needs attention; report.json has everything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.archive.journal import Entry
from coordinator.report.cost import costs, with_waiting
from coordinator.report.data import gather
from coordinator.report.many import (
    MANY,
    SHOWN,
    alike,
    for_display,
    grouped,
    of_own_models,
    summed,
    with_equal_facilities,
)
from coordinator.report.timeline import Segment, totals
from coordinator.report.write import FORMATS, write_report
from tests.comparison.made import add_comparison
from tests.report.made import made_archive

shared = pytest.mark.xdist_group("a report of many")
"""These tests share one archive: one process runs them, and it is made once."""


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("many")
    archive = made_archive(root / "a", facilities=256, rounds=3)
    facilities = [{"name": f"facility-{n:02d}", "dataset": f"/data/{n}", "steps": 9} for n in range(256)]
    return gather(archive, federation="made", settings={"rounds": 3, "facilities": facilities}, carbon=300.0)


@shared
@pytest.mark.slow
def test_pages_of_256_facilities_are_small_and_their_data_whole(many: dict[str, Any], tmp_path: Path):
    paths = {kind: write_report(many, tmp_path / f"report.{kind}", kind) for kind in FORMATS}
    page, text = paths["html"].read_text(), paths["md"].read_text()
    assert len(page) < 1_500_000 and len(text.splitlines()) < 1300
    assert "the 12 with the slowest transfers of 256; report.json has all" in page
    assert "The 12 with the slowest transfers of 256; report.json has all." in text
    assert "32 that point\nleast towards the mean of" in page
    assert json.loads(paths["json"].read_text()) == json.loads(json.dumps(many))


@shared
@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_of_many_whose_times_are_unknown_there_is_a_report(many: dict[str, Any], tmp_path: Path, kind: str):
    """No event of any facility: no timeline, and everything else."""
    without = many | {"timeline": many["timeline"] | {"segments": [], "totals": {}}}
    file = write_report(without, tmp_path / f"report.{kind}", kind)
    assert "facility-0" in file.read_text()


@shared
def test_each_table_has_those_that_need_attention(many: dict[str, Any]):
    small = for_display(many)
    speeds = [one["from_mbit_per_second"] for one in many["traffic"].values() if one["from_mbit_per_second"]]
    shown = [min(one["to_mbit_per_second"], one["from_mbit_per_second"] or 1e9) for one in small["traffic"].values()]
    assert len(shown) == SHOWN and shown == sorted(shown) and shown[0] <= min(speeds)
    hours = [one["node_hours"] for one in small["cost"]["facilities"].values()]
    assert hours == sorted((one["node_hours"] for one in many["cost"]["facilities"].values()), reverse=True)[:SHOWN]
    assert small["cost"]["total"] == many["cost"]["total"]
    for entry, whole in zip(small["rounds"], many["rounds"], strict=True):
        first, *others = entry["facilities"]
        out = [r["facility"] for r in whole["facilities"] if r["status"] != "ok"]
        assert [row["facility"] for row in others] == [f"{', '.join(out[:3])} and {len(out) - 3} more"]
        assert first["facility"] == f"{256 - len(out)} facilities"
        assert first["tokens"] + sum(row["tokens"] for row in others) == sum(r["tokens"] for r in whole["facilities"])
    assert len(small["settings"]["facilities"]) == 1 and "and 244 more" in small["settings"]["facilities"][0]["name"]
    assert [name.split(",")[0] for name in small["versions"]] == ["coordinator", "facility-00"]


@pytest.mark.parametrize("count", [MANY, MANY + 1])
def test_few_are_shown_as_they_are(tmp_path: Path, count: int):
    archive = made_archive(tmp_path / "a", facilities=count, rounds=1)
    data = gather(archive, federation="made", settings={"rounds": 1}, carbon=0.0)
    small = for_display(data)
    assert (small["traffic"] == data["traffic"]) == (small["rounds"] == data["rounds"]) == (count == MANY)
    assert any(small["chosen"].values()) == (count > MANY)


def test_failures_of_one_reason_share_a_line():
    failures = [
        {"round": n // 60, "facility": f"f{n}", "status": "failed", "reason": "no node", "done": "went on"}
        for n in range(120)
    ]
    assert [one["facility"].endswith("and 48 more") for one in grouped(failures)] == [True, True]
    assert grouped(failures[:5]) == failures[:5]


def test_of_many_the_matrix_has_each_ones_own_models_where_the_global_one_does_worst(tmp_path: Path):
    names = [f"facility-{number:02d}" for number in range(40)]
    archive = add_comparison(made_archive(tmp_path / "a", facilities=40, rounds=1), names)
    data = gather(archive, federation="made", settings={"rounds": 1}, carbon=0.0)
    small = of_own_models(data["matrix"])
    assert small["models"] == ["initial", "global", "own update", "own alone"] and len(small["data"]) == 32
    values = {(one["data"], one["model"]): one["perplexity"] for one in small["cells"]}
    for one in data["matrix"]["cells"]:
        if one["data"] in small["data"] and one["model"] == f"{one['facility']} alone":
            assert values[one["data"], "own alone"] == one["perplexity"]
    assert all(line.startswith(tuple(small["data"])) for line in small["verdicts"]) and small["verdicts"]


def test_nothing_is_merged_that_differs():
    row = {"status": "ok", "tokens": 1, "seconds": 1.0, "weight": 0.1, "tokens_per_second": 1.0}
    assert summed([row | {"facility": "a"}]) == [row | {"facility": "a"}]
    assert alike({"a": {"torch": "1"}, "b": {"torch": "2"}}) == {"a": {"torch": "1"}, "b": {"torch": "2"}}
    settings = {"facilities": [{"name": "a", "steps": 1}, {"name": "b", "steps": 2}]}
    assert with_equal_facilities(settings) == settings
    assert with_equal_facilities({"facilities": ["a", "b"]}) == {"facilities": ["a", "b"]}


def test_time_grows_with_rows_and_not_with_rows_times_facilities():
    """Of 500 facilities with 20 rounds: a search among all rows for each facility compares five million times."""

    class Name(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str.__eq__(self, other)  # type: ignore[arg-type]

        __hash__ = str.__hash__

    names = [Name(f"f{number}") for number in range(500)]
    rows = [{"facility": Name(name), "round": number, "usage": {}} for name in names for number in range(20)]
    entries = [Entry(time=1.0, kind="waited", facility=Name(name), detail={"seconds": 1.0}) for name in names]
    spans = [Segment(facility=row["facility"], kind="train", begin=0.0, end=1.0) for row in rows]  # type: ignore[arg-type]
    with_waiting(costs(rows, names, 0.0), entries)
    totals(spans, names)
    assert Name.compared < 100_000
