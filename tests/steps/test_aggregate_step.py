"""Receiving and closing a round: who takes part, what is asked again, what ends the loop."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordinator.aggregation.settings import AggregationSettings
from coordinator.archive.privacy import reported_privacy
from coordinator.archive.remarks import summary_remarks
from coordinator.archive.rewind import rewind
from coordinator.archive.rounds import Archive
from coordinator.archive.summary import summary
from coordinator.config.privacy import PrivacySettings
from coordinator.config.settings import CoordinatorSettings, StopSettings
from coordinator.rounds.verification import averaged_as_encoded
from coordinator.steps.aggregate import close_round
from coordinator.steps.arrived import CollectedRound, sort_out
from coordinator.steps.expectation import Expected
from coordinator.steps.masked_round import survivors_of
from coordinator.steps.receive import receive
from coordinator.steps.start import start
from facility.exchange.checkpoints.checkpoint import open_checkpoint, read_header
from facility.exchange.checkpoints.delta import FILE, encode_update
from facility.exchange.checkpoints.mean_walk import has_mean_walk
from facility.exchange.messages import drift, report
from facility.exchange.messages.drift import DriftReport
from facility.exchange.messages.manifest import read_manifest, write_manifest
from facility.exchange.messages.privacy import DETAILS, RELEASED, DifferentialSettings
from facility.exchange.messages.report import Failure, read_report
from facility.exchange.messages.usage import Usage, with_usage
from tests.aggregation.updates import write_update
from tests.pico import save_pico

SETTINGS = CoordinatorSettings(federation="f", rounds=2, facilities=["a", "b"])


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Archive, Path]:
    archive = Archive(tmp_path / "archive")
    model, _, _ = start(archive, save_pico(tmp_path / "model", dtype="bfloat16"), SETTINGS)
    return archive, model


def failure(directory: Path, facility: str, *, number: int = 0, **changes: object) -> Path:
    directory.mkdir()
    report.write(directory, Failure(facility=facility, round=number, reason="the node burnt down", **changes))  # type: ignore[arg-type]
    return directory


def close(
    archive: Archive, model: Path, directories: list[Path], settings: CoordinatorSettings = SETTINGS, number: int = 0
):
    return close_round(
        CollectedRound(archive=archive, settings=settings, model=model, number=number, arrived=sort_out(directories))
    )


def test_a_round_is_archived_whole_and_the_next_follows(begun: tuple[Archive, Path], tmp_path: Path):
    archive, model = begun
    updates = [
        write_update(tmp_path / "a", model, "a", move=0.02, tokens=300),
        write_update(tmp_path / "b", model, "b", move=0.0, tokens=100),
    ]
    following, number, proceed = close(archive, model, updates)
    assert (number, proceed, archive.rounds()) == (1, True, [0])
    entry = archive.read_round(0)
    assert {row.facility: row.weight for row in entry.facilities} == {"a": 0.75, "b": 0.25}
    before, after = open_checkpoint(model), open_checkpoint(following)
    for name in before.tensors:  # the token-weighted mean of the moves is 0.75 * 0.02; the first step has no momentum
        assert torch.allclose(after.read(name).float(), before.read(name).float() + 0.015, atol=8e-3)
    assert json.loads((archive.path / "history.jsonl").read_text().splitlines()[0])["facility"] == "a"


def test_the_last_round_asks_for_the_final_evaluation_once(begun: tuple[Archive, Path], tmp_path: Path):
    archive, model = begun
    following, _, _ = close(archive, model, [write_update(tmp_path / "a0", model, "a")])
    last, number, proceed = close(
        archive, following, [write_update(tmp_path / "a1", following, "a", round=1)], number=1
    )
    assert (number, proceed) == (SETTINGS.rounds, True)
    evaluation = write_update(tmp_path / "e", last, "a", round=2, loss=1.5)
    assert close(archive, last, [evaluation], number=2) == (last, 2, False)
    assert archive.read_note("evaluation")["global_loss"] == 1.5
    assert archive.rounds() == [0, 1]


def test_a_failed_facility_is_told_and_the_round_goes_on(begun: tuple[Archive, Path], tmp_path: Path):
    archive, model = begun
    close(archive, model, [write_update(tmp_path / "a", model, "a"), failure(tmp_path / "b", "b")])
    rows = {row.facility: row for row in archive.read_round(0).facilities}
    assert (rows["b"].status, rows["b"].reason, rows["a"].weight) == ("failed", "the node burnt down", 1.0)


def test_the_mean_walk_ends_with_a_facility_that_leaves(begun: tuple[Archive, Path], tmp_path: Path):
    """Drift is corrected by the mean of all facilities' walks; one that was removed from federation.yml has none."""
    archive, model = begun
    settings = dataclasses.replace(SETTINGS, rounds=4, facilities=["a", "b", "c"])
    for number, there in enumerate(("abc", "ab", "ab")):
        updates = []
        for name in there:
            updates.append(write_update(tmp_path / f"{name}{number}", model, name, round=number))
            told = DriftReport(rates=0.1, corrected=number > 0, share=0.0, reason="")
            report.write(
                updates[-1], dataclasses.replace(read_report(updates[-1]), details={drift.KEY: told.to_json()})
            )
            write_manifest(updates[-1], read_manifest(updates[-1]))
        now = dataclasses.replace(settings, facilities=["a", "b"]) if number == 2 else settings
        model, _, _ = close(archive, model, updates, now, number)
        assert has_mean_walk(model) == (number < 2)
    walk = archive.read_round(2).aggregation["details"]["mean_walk"]
    assert walk["reason"].startswith("c left the federation")


def test_a_message_that_cannot_be_decoded_is_the_absence_of_its_facility(begun: tuple[Archive, Path], tmp_path: Path):
    """The receive step hands differences on as they came; only the pass that averages them sees what they hold."""
    archive, model = begun
    settings = dataclasses.replace(SETTINGS, facilities=["a", "b", "c"])
    assert averaged_as_encoded(settings)
    messages = []
    for name in "abc":
        full = write_update(tmp_path / f"full-{name}", model, name, move=0.02)
        encode_update(full=full, reference=model, out=tmp_path / name, encoding="delta-int8", norms=True)
        if name == "b":
            damage(tmp_path / name)
        told = receive(
            tmp_path / name,
            Expected(
                facility=name,
                round=0,
                model=model,
                evaluation=False,
                settings=settings.aggregation,
                content=False,
                encoded=True,
            ),
        )
        assert told is None, told
        messages.append(tmp_path / name)
    _, number, proceed = close(archive, model, messages, settings)
    assert (number, proceed) == (1, True)
    rows = {row.facility: row for row in archive.read_round(0).facilities}
    assert (rows["b"].status, rows["b"].weight) == ("refused", 0.0) and "a scale is negative" in rows["b"].reason
    assert rows["a"].weight == rows["c"].weight == 0.5
    message = sum(entry.size for entry in read_manifest(messages[0]).files.values())
    assert rows["a"].received_bytes == message < 0.7 * open_checkpoint(model).bytes


def damage(message: Path) -> None:
    """Make the first scale NaN, as a facility would that means harm: with a manifest that fits."""
    entries, _ = read_header(message / FILE)
    scale = next(entry for name, entry in entries.items() if name.endswith("::scale"))
    with open(message / FILE, "r+b") as file:
        file.seek(scale.start)
        file.write(b"\xff\xff\xff\xff")
    write_manifest(message, dataclasses.replace(read_manifest(message), files={}))


def test_a_facility_that_ran_out_of_time_is_asked_again(begun: tuple[Archive, Path], tmp_path: Path):
    archive, model = begun
    directories = [write_update(tmp_path / "a", model, "a"), failure(tmp_path / "b", "b", again=True)]
    assert close(archive, model, directories) == (model, 0, True)
    assert archive.rounds() == []
    assert close(archive, model, [directories[0], write_update(tmp_path / "b2", model, "b")])[1:] == (1, True)
    assert archive.read_round(0).attempts == 2
    assert archive.read_note("attempts") == {}


def test_retries_are_counted_and_bounded(begun: tuple[Archive, Path], tmp_path: Path):
    archive, model = begun
    settings = CoordinatorSettings(federation="f", rounds=2, facilities=["a", "b"], retries=2)
    directories = [write_update(tmp_path / "a", model, "a"), failure(tmp_path / "b", "b")]
    assert [close(archive, model, directories, settings)[1] for _ in range(3)] == [0, 0, 1]


def test_too_few_updates_end_the_loop_with_a_reason_and_no_round(begun: tuple[Archive, Path], tmp_path: Path):
    archive, model = begun
    assert close(archive, model, [failure(tmp_path / "b", "b")])[2] is False
    assert archive.rounds() == []
    assert "got 0 sound updates" in archive.read_note("stopped")["reason"]
    assert "the node burnt down" in archive.read_note("stopped")["reason"]


@pytest.mark.parametrize("guard", [True, False])
def test_a_round_that_was_worse_halves_the_server_rate_and_the_archive_says_so(
    begun: tuple[Archive, Path], tmp_path: Path, guard: bool
):
    archive, model = begun
    aggregation = AggregationSettings(rule="mean", guard=guard)
    settings = CoordinatorSettings(federation="f", rounds=5, facilities=["a"], aggregation=aggregation)
    for number, loss in enumerate((4.0, 4.5)):
        update = write_update(tmp_path / f"a{number}", model, "a", round=number, loss=loss, move=0.5)
        before, (model, _, _) = model, close(archive, model, [update], settings, number)
    entry, factor = archive.read_round(1), 0.5 if guard else 1.0
    assert (entry.outer_factor, bool(entry.guard)) == (factor, guard)
    assert entry.aggregation["settings"]["server_learning_rate"] == factor
    for name, old in open_checkpoint(before).tensors.items():
        if old.dtype == "BF16":
            moved = open_checkpoint(model).read(name).float() - open_checkpoint(before).read(name).float()
            assert torch.allclose(moved, torch.full_like(moved, 0.5 * factor), atol=2e-2), name


@pytest.mark.parametrize(("private", "factor"), [(True, 1.0), (False, 0.5)])
def test_a_rise_that_the_noise_of_the_losses_explains_is_told_and_lowers_no_rate(
    begun: tuple[Archive, Path], tmp_path: Path, private: bool, factor: float
):
    """Without differential privacy in the settings no facility's word on noise counts."""
    archive, model = begun
    differential = DifferentialSettings(epsilon=8.0, delta=1e-5) if private else None
    settings = CoordinatorSettings(
        federation="f",
        rounds=5,
        facilities=["a", "b"],
        aggregation=AggregationSettings(rule="mean"),
        privacy=PrivacySettings(differential=differential),
    )
    for number, loss in enumerate((4.0, 4.2)):  # each of noise 0.1
        updates = [
            noised(tmp_path / f"{name}{number}", model, name, number + 1, number=number, loss=loss) for name in "ab"
        ]
        model, _, _ = close(archive, model, updates, settings, number)
    entry = archive.read_round(1)
    assert "is worse than the one before (mean validation loss 4.2000 after 4.0000)" in entry.guard
    assert (entry.outer_factor, entry.aggregation["settings"]["server_learning_rate"]) == (factor, factor)


@pytest.mark.parametrize(("rate", "share"), [("share", 0.625), ("full", 1.0), ("auto", 1.0)])
def test_a_round_that_a_facility_misses_moves_by_the_present_share(
    begun: tuple[Archive, Path], tmp_path: Path, rate: Any, share: float
):
    archive, model = begun
    aggregation = AggregationSettings(rule="mean", guard=False, incomplete_rate=rate)
    settings = dataclasses.replace(SETTINGS, rounds=5, aggregation=aggregation)
    both = [write_update(tmp_path / name, model, name, tokens=n) for name, n in (("a", 100), ("b", 60))]
    model, _, _ = close(archive, model, both, settings)
    alone = [write_update(tmp_path / "a1", model, "a", round=1, move=0.5, tokens=100), failure(tmp_path / "b1", "b")]
    following, _, _ = close(archive, model, alone, settings, 1)
    found = [archive.read_round(number) for number in (0, 1)]
    assert [one.present for one in found] == [1.0, share]
    told = [line for line in summary_remarks(summary(archive)) if "facilities missed" in line]
    assert told == ([] if share == 1 else ["rounds that facilities missed: 1, at 0.62 of the server learning rate"])
    assert [one.aggregation["settings"]["server_learning_rate"] for one in found] == [1.0, share]
    for name, old in open_checkpoint(model).tensors.items():
        if old.dtype == "BF16":
            moved = open_checkpoint(following).read(name).float() - open_checkpoint(model).read(name).float()
            assert torch.allclose(moved, torch.full_like(moved, 0.5 * share), atol=2e-2), name


def test_divergence_stops_and_says_where_the_good_models_are(begun: tuple[Archive, Path], tmp_path: Path):
    archive, model = begun
    settings = CoordinatorSettings(federation="f", rounds=5, facilities=["a"], stop=StopSettings(divergence=1.0))
    following, _, _ = close(archive, model, [write_update(tmp_path / "a0", model, "a", loss=2.0)], settings)
    assert (
        close(archive, following, [write_update(tmp_path / "a1", following, "a", round=1, loss=3.5)], settings, 1)[2]
        is False
    )
    assert archive.read_round(1).broken and str(archive.path) in archive.read_note("stopped")["reason"]
    assert (
        start(archive, tmp_path / "model", settings)[1] == settings.rounds
    )  # typing the command again does not train on


def refused(tmp_path: Path, model: Path, update: Path | None, *, facility: str = "a", round: int = 0) -> str:
    told = receive(
        update, Expected(facility=facility, round=round, model=model, evaluation=False, settings=AggregationSettings())
    )
    assert told is not None
    return f"{told.kind}: {told.reason}"


def test_receive_names_what_is_wrong(begun: tuple[Archive, Path], tmp_path: Path):
    _, model = begun
    good = write_update(tmp_path / "good", model, "a")
    assert (
        receive(good, Expected(facility="a", round=0, model=model, evaluation=False, settings=AggregationSettings()))
        is None
    )
    assert refused(tmp_path, model, None).startswith("absent: left no update")
    assert "of facility 'a'" in refused(tmp_path, model, good, facility="b")
    assert "of round 0, expected round 1" in refused(tmp_path, model, good, round=1)
    nan = write_update(tmp_path / "nan", model, "a", move=float("nan"))
    assert "NaN or infinity" in refused(tmp_path, model, nan)
    wide = save_pico(tmp_path / "wide", hidden_size=64, dtype="bfloat16")
    (wide / "manifest.json").write_text((model / "manifest.json").read_text())
    assert "shape" in refused(tmp_path, model, write_update(tmp_path / "shapes", wide, "a"))
    weights = good / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert "truncated" in refused(tmp_path, model, good)
    (good / "manifest.json").unlink()
    assert "no manifest.json" in refused(tmp_path, model, good)


@pytest.mark.parametrize("retries", [0, 1])
def test_an_update_that_averaging_finds_damaged_is_asked_for_again_or_left_out(
    begun: tuple[Archive, Path], tmp_path: Path, retries: int
):
    archive, model = begun
    updates = [write_update(tmp_path / name, model, name, move=0.01) for name in ("a", "b")]
    settings = dataclasses.replace(SETTINGS, retries=retries)
    for update in updates:
        assert receive_unread(update, model) is None
    with open(updates[1] / "model.safetensors", "r+b") as file:
        file.seek(-64, 2)
        file.write(b"\x01" * 64)
    assert receive_unread(updates[1], model) is None
    following, number, proceed = close(archive, model, updates, settings)
    if retries:
        assert (following, number, proceed, archive.rounds()) == (model, 0, True, [])
        assert "another sha256" in archive.read_note("attempts")["failures"]
        following, number, proceed = close(archive, model, updates, settings)
    assert (number, proceed, archive.rounds()) == (1, True, [0])
    rows = {row.facility: row for row in archive.read_round(0).facilities}
    assert (rows["a"].status, rows["a"].weight, rows["b"].status) == ("ok", 1.0, "refused")
    assert "another sha256" in rows["b"].reason


def receive_unread(update: Path, model: Path) -> Failure | None:
    """What the receive step finds where averaging verifies the content."""
    return receive(
        update,
        Expected(
            facility=update.name, round=0, model=model, evaluation=False, settings=AggregationSettings(), content=False
        ),
    )


def test_the_next_model_tells_of_how_many_noised_steps_the_coordinator_has_reports(
    begun: tuple[Archive, Path], tmp_path: Path
):
    """The most that each has told of, also of one that left none in this round: its ledger may not hold fewer."""
    archive, model = begun
    following, _, _ = close(
        archive, model, [noised(tmp_path / "a", model, "a", 4), noised(tmp_path / "b", model, "b", 5)]
    )
    assert read_manifest(following).extra[RELEASED] == {"a": 4, "b": 5}
    absent = failure(tmp_path / "b1", "b", number=1)
    updates = [noised(tmp_path / "a1", following, "a", 9, number=1), absent]
    close(archive, following, updates, dataclasses.replace(SETTINGS, retries=0, minimum_facilities=1), number=1)
    assert read_manifest(archive.model_for(2)).extra[RELEASED] == {"a": 9, "b": 5}
    rewind(archive, 1)
    close(archive, following, [noised(tmp_path / "b2", following, "b", 6, number=1)], number=1)
    assert read_manifest(archive.model_for(2)).extra[RELEASED] == {"a": 9, "b": 6}


def test_what_an_outlier_has_spent_of_its_budget_is_told_too(begun: tuple[Archive, Path], tmp_path: Path):
    archive, model = begun
    updates = [noised(tmp_path / one, model, one, 4, move=1000.0 if one == "d" else 0.01) for one in "abcd"]
    close(archive, model, updates, dataclasses.replace(SETTINGS, facilities=[*"abcd"], retries=0))
    row = archive.read_round(0).facilities[3]
    assert (row.facility, row.status, row.privacy["steps"]) == ("d", "refused", 4)
    assert read_manifest(archive.model_for(1)).extra[RELEASED] == dict.fromkeys("abcd", 4)


def test_what_a_damaged_update_has_cost_is_told_too(begun: tuple[Archive, Path], tmp_path: Path):
    archive, model = begun
    updates = [noised(tmp_path / name, model, name, 4) for name in ("a", "b")]
    with_usage(updates[1], Usage(node_seconds=90.0))
    with open(updates[1] / "model.safetensors", "r+b") as file:
        file.seek(-64, 2)
        file.write(b"\x01" * 64)
    close(archive, model, updates, dataclasses.replace(SETTINGS, retries=0))
    row = archive.read_round(0).facilities[1]
    assert (row.facility, row.status, row.weight) == ("b", "refused", 0.0)
    assert row.privacy["steps"] == 4
    assert row.usage["node_seconds"] == 90.0 and row.received_bytes > 0 and row.update_sha256
    assert read_manifest(archive.model_for(1)).extra[RELEASED] == {"a": 4, "b": 4}


def test_what_was_spent_on_an_update_that_came_after_the_sum_of_its_round_is_told_too(
    begun: tuple[Archive, Path], tmp_path: Path
):
    _, model = begun
    updates = [noised(tmp_path / name, model, name, 4) for name in ("a", "b")]
    pending: Any = SimpleNamespace(update=lambda name: tmp_path / name)
    asked: Any = SimpleNamespace(survivors=["a"], round=0)
    found = survivors_of(pending, asked, sort_out(updates))
    assert (set(found.reports), set(found.failures)) == ({"a"}, {"b"})
    assert reported_privacy(found.dropped_reports["b"])["steps"] == 4


def noised(
    directory: Path, model: Path, name: str, steps: int, *, number: int = 0, move: float = 0.01, loss: float = 2.0
) -> Path:
    """An update whose report tells of so many noised steps."""
    write_update(directory, model, name, round=number, move=move, loss=loss)
    figures = dict.fromkeys(("epsilon", "delta", "clip", "spent", "spent_on_validation", "noise_multiplier"), 0.1)
    figures |= {"sampling_rate": 0.1, "validation_deviation": 0.1}
    told = read_report(directory)
    report.write(directory, dataclasses.replace(told, details={DETAILS: figures | {"unit": "block", "steps": steps}}))
    write_manifest(directory, read_manifest(directory))
    return directory


@pytest.mark.parametrize("move", [1000.0, float("nan")], ids=["outlier", "not finite"])
def test_an_update_that_is_left_out_while_averaging_is_as_absent_as_one_that_never_came(tmp_path: Path, move: float):
    """The rate by who is there, the guard and the next model are those of a round that the facility failed."""
    rule = AggregationSettings(rule="nesterov", incomplete_rate="share", guard=True)
    settings = dataclasses.replace(SETTINGS, rounds=3, facilities=["a", "b", "c", "d"], retries=0, aggregation=rule)
    found = []
    for way in ("left out", "failed"):
        archive = Archive(tmp_path / way)
        model, _, _ = start(archive, save_pico(tmp_path / f"{way} model", dtype="bfloat16"), settings)
        for number in range(2):
            place = tmp_path / f"{way} {number}"
            updates = [write_update(place / name, model, name, round=number, tokens=100) for name in "abc"]
            if number == 1 and way == "failed":
                updates.append(failure(place / "d", "d", number=1))
            else:  # its loss alone says that the first round made the model worse
                moved, loss = (move, 2.5) if number else (0.01, 2.0)
                updates.append(write_update(place / "d", model, "d", round=number, move=moved, tokens=300, loss=loss))
            model, _, _ = close(archive, model, updates, settings, number)
        entry = archive.read_round(1)
        rate = entry.aggregation["settings"]["server_learning_rate"]
        found.append((entry.present, entry.outer_factor, rate, read_manifest(model).files["model.safetensors"].sha256))
        assert entry.facilities[3].status == ("refused" if way == "left out" else "failed")
    assert found[0] == found[1] and found[0][:2] == (pytest.approx(0.5), 1.0)
