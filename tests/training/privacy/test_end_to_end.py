"""A federation with differential privacy under StreamFlow: budgets, the report, a facility whose budget is spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.archive.rounds import Archive
from coordinator.archive.summary import summary
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.report.make import data_of
from facility.rounds.privacy_ledger import Entry, ReleaseLedger
from tests.engine.engines import streamflow
from tests.federations import write_federation


def ledger_of(root: Path, name: str) -> ReleaseLedger:
    return ReleaseLedger(state=root / "sites" / name / ".crossfed" / "pico" / name)


def spend(ledger: ReleaseLedger) -> None:
    """As if an earlier federation of the same name had trained on the same data."""
    ledger.open()
    used = Entry(kind="training", round=0, unit="block", noise_multiplier=0.4, sampling_rate=0.0625)
    for _ in range(40):
        ledger.record(used)
    ledger.close()


@pytest.mark.slow
def test_a_federation_ends_at_the_stated_epsilon_without_the_facility_that_has_spent_it(tmp_path: Path):
    names = ["north", "south", "spent"]
    path = write_federation(
        tmp_path,
        names,
        minimum_facilities=2,
        privacy={"differential": {"epsilon": 8.0, "delta": 1e-3, "unit": "block"}},
        training={"lora": {"rank": 2}},
    )
    write_rendered(read_federation(path))
    spend(ledger_of(tmp_path, "spent"))
    result = streamflow(path, tmp_path / "engine")
    assert result.returncode == 0, result.stdout[-6000:]
    rounds = summary(Archive(read_federation(path).archive_path))["rounds"]
    assert len(rounds) == 2
    for number, entry in enumerate(rounds):
        rows = {row["facility"]: row for row in entry["facilities"]}
        assert [rows[name]["status"] for name in names] == ["ok", "ok", "failed"]
        assert "out of its privacy budget: 40 steps have spent epsilon" in rows["spent"]["reason"]
        for name in names[:2]:
            told = rows[name]["privacy"]
            assert told["steps"] == 4 * (number + 1) and 0 < told["spent"] <= 8
            assert (told["spent"] > 0.99 * 8) == (number == 1)
            assert rows[name]["tokens"] == 4 * 4 * 16, "the claim is steps x expected batch, whatever was drawn"
    for name in names[:2]:
        ledger = ledger_of(tmp_path, name)
        assert (ledger.count("training"), ledger.count("validation")) == (8, 5)
    assert ledger_of(tmp_path, "spent").count("training") == 40
    report = data_of(read_federation(path))
    told = report["privacy"]["facilities"]
    assert set(told) == set(names) and report["privacy"]["stated"] == 8
    assert all(told[name]["spent"] <= 8 and told[name]["steps"] == 8 for name in names[:2])
    # It trains no more, but its noised loss of the final model is one more release of its validation data.
    assert ledger_of(tmp_path, "spent").count("validation") == 1
    assert (
        told["spent"]["steps"] == 40 and 0 < told["spent"]["spent_on_validation"] < told["north"]["spent_on_validation"]
    )
