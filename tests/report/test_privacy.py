"""Privacy budgets are shown where a person looks: in the status table, the report, and the model card."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.archive.privacy import reported_privacy
from coordinator.archive.remarks import summary_remarks
from coordinator.archive.rounds import Archive, FacilityRow
from coordinator.archive.summary import summary
from coordinator.publishing.card import NO_GUARANTEE, privacy
from coordinator.report.data import gather
from coordinator.report.markdown import markdown
from coordinator.report.page import page
from facility.exchange.messages.report import Report
from tests.report.made import made_archive

BUDGET = {
    "epsilon": 8.0,
    "delta": 1e-6,
    "unit": "document",
    "clip": 1.0,
    "spent": 2.5,
    "spent_on_validation": 1.0,
    "noise_multiplier": 0.75,
    "sampling_rate": 0.01,
    "steps": 300,
    "validation_deviation": 0.02,
}


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    """Two rounds of three facilities; two of them tell a budget, which grows."""
    archive = made_archive(tmp_path, facilities=3, rounds=2)
    for number in range(2):
        path = archive.round_directory(number) / "round.json"
        record = json.loads(path.read_text())
        for place, spent in ((0, 1.5), (1, 1.25)):
            record["facilities"][place]["privacy"] = BUDGET | {
                "spent": spent * (number + 1),
                "spent_on_validation": spent + number,
                "steps": 100 * number,
            }
        path.write_text(json.dumps(record))
    found = gather(archive, federation="made", settings={"rounds": 2})
    found["rows"] = summary_remarks(summary(archive))
    return found


def test_the_latest_budget_of_each_facility_is_shown(data: dict[str, Any]):
    assert data["privacy"]["epsilon"] == 3.0 and data["privacy"]["stated"] == 8.0
    assert [one["spent"] for one in data["privacy"]["facilities"].values()] == [3.0, 2.5]
    assert any("privacy of facility-00: epsilon 3 of 8 (delta 1e-06, unit document)" in line for line in data["rows"])
    text = markdown(data)
    assert "## Privacy" in text and "| facility-01 | 2.5" in text
    assert 'id="privacy"' in page(data)
    assert data["privacy"]["epsilon_of_validation"] == 2.5
    assert any("epsilon 2.5 of its validation data" in line for line in data["rows"]), "whose documents are others"
    sections = text.split("## Privacy")[1].split("##")[0], page(data).split('id="privacy"')[1].split("<h2")[0]
    assert all("2.25" in section for section in sections)


def test_the_card_states_the_largest_epsilon_and_who_told_none(data: dict[str, Any]):
    told = privacy(data)
    assert "ε = 3, δ = 1e-06 for adding or removing one document" in told and "before training was ε = 8" in told
    assert "noised as well: ε = 2.5 for one of the validation data" in told
    assert "1 of 3 facilities reported no budget" in told
    assert "the coordinator, which can see each of them" in told
    assert privacy(data | {"privacy": {}}).endswith(NO_GUARANTEE)


@pytest.mark.parametrize("told", [True, False], ids=["counted", "of an earlier version"])
def test_the_loss_of_the_final_evaluation_is_paid_for_as_well(tmp_path: Path, data: dict[str, Any], told: bool):
    """A facility of an earlier version reports nothing of it: then the card says of which time the epsilon is."""
    archive, spent = Archive(tmp_path), 4.0 if told else 2.5
    budget = BUDGET | {"spent_on_validation": 4.0, "steps": 100} if told else {}
    rows = [FacilityRow(round=2, facility=name, status="ok", privacy=budget) for name in data["facilities"][:2]]
    rows.append(FacilityRow(round=2, facility=data["facilities"][2], status="failed", reason="its disk is full"))
    described = [dataclasses.asdict(row) for row in rows]
    archive.write_note("evaluation", {"after_round": 1, "global_loss": 1.0, "facilities": described})
    now = gather(archive, federation="made", settings={"rounds": 2})
    assert now["privacy"]["epsilon_of_validation"] == spent
    assert any(f"epsilon {spent:g} of its validation data" in line for line in summary_remarks(summary(archive)))
    assert ("up to the last round ε" in privacy(now)) is not told
    assert ("is counted as well" if told else "comes on top, within ε at the end") in page(now)


@pytest.mark.parametrize("bare", [0, 1], ids=["switched on", "switched off"])
def test_an_epsilon_of_some_rounds_is_no_promise(data: dict[str, Any], tmp_path: Path, bare: int):
    """Differential privacy was accepted, or dropped, between two rounds: one of facility-00's has no budget."""
    archive = Archive(tmp_path)
    path = archive.round_directory(bare) / "round.json"
    record = json.loads(path.read_text())
    record["facilities"][0]["privacy"] = {}
    path.write_text(json.dumps(record))
    found = gather(archive, federation="made", settings={"rounds": 2})
    assert found["privacy"]["without_budget"] == {"facility-00": [bare]}
    words = f"nothing is promised for its data, which it trained on without a budget in round {bare}"
    line = next(one for one in summary_remarks(summary(archive)) if one.startswith("privacy of facility-00"))
    assert line.endswith(words) and f"facility-00: {words}." in markdown(found)
    assert f"facility-00: {words}." in page(found)
    assert f"1 of them trained without a budget in some rounds (the first is round {bare}): nothing" in privacy(found)
    assert data["privacy"]["without_budget"] == {} and "without a budget" not in privacy(data)


def test_the_card_does_not_say_of_a_budget_that_was_raised_that_it_was_stated_before_training(
    data: dict[str, Any], tmp_path: Path
):
    archive = Archive(tmp_path)
    path = archive.round_directory(1) / "round.json"
    record = json.loads(path.read_text())
    for place in (0, 1):
        record["facilities"][place]["privacy"]["epsilon"] = 12.0
    path.write_text(json.dumps(record))
    told = privacy(gather(archive, federation="made", settings={"rounds": 2}))
    assert "before training was ε = 8; it was changed while training went on, to ε = 12." in told
    assert "before training was ε = 8." in privacy(data)


def test_going_back_gives_nothing_of_a_budget_back(data: dict[str, Any], tmp_path: Path):
    archive = Archive(tmp_path)
    (aside := tmp_path / "rewound-20260101-000000").mkdir()
    archive.round_directory(1).rename(aside / "round-0001")
    archive.write_history()
    found = gather(archive, federation="made", settings={"rounds": 2})
    assert found["privacy"]["facilities"] == data["privacy"]["facilities"] and len(found["rounds"]) == 1
    before, now = (
        [one for one in lines if one.startswith("privacy")]
        for lines in (data["rows"], summary_remarks(summary(archive)))
    )
    assert len(now) == 2 and now == before


MASKS = {"bits": 16, "threshold": 2, "survivors": ["facility-00", "facility-01", "facility-02"]}


@pytest.mark.parametrize("masked", [1, 2], ids=["some rounds", "all rounds"])
def test_rounds_of_sums_alone_are_told_beside_the_budget(tmp_path: Path, masked: int):
    archive = made_archive(tmp_path, facilities=3, rounds=2)
    for number in range(2 - masked, 2):
        path = archive.round_directory(number) / "round.json"
        record = json.loads(path.read_text())
        record["facilities"][0]["privacy"] = BUDGET
        record["aggregation"]["details"] = {"masking": MASKS | {"survivors": MASKS["survivors"][number - 1 :]}}
        path.write_text(json.dumps(record))
    found = gather(archive, federation="made", settings={"rounds": 2})
    least = 3 if masked == 1 else 1
    words = f"in {masked} of 2 rounds (16 bits): the coordinator learnt sums of {least} updates or more"
    assert any(words in line for line in summary_remarks(summary(archive)))
    assert words in markdown(found) and f"sums of {least} updates or more, and no single one" in page(found)
    told = privacy(found)
    assert f"sums of {least} updates or more and no single one" in told and "ε = 2.5" in told
    assert "can see each" not in told and ("in 1 of 2 rounds" in told) == (masked == 1)
    assert "masked" not in privacy(found | {"masking": {}}) and privacy(found | {"privacy": {}}).endswith(NO_GUARANTEE)


@pytest.mark.parametrize(
    "privacy", [None, [], "x", {}, BUDGET | {"spent": -1}, BUDGET | {"unit": "person"}, BUDGET | {"steps": 1e400}]
)
def test_what_cannot_be_read_is_no_budget(privacy: Any):
    values = dict.fromkeys(("round", "samples", "tokens", "steps"), 0) | dict.fromkeys(
        ("loss_received", "loss_returned", "perplexity_received", "perplexity_returned", "training_loss"), 1.0
    )
    report = Report(federation="f", facility="a", details={"privacy": privacy}, **values)  # type: ignore[arg-type]
    assert reported_privacy(report) == {}
    assert reported_privacy(Report(federation="f", facility="a", details={"privacy": BUDGET}, **values)) == BUDGET  # type: ignore[arg-type]
