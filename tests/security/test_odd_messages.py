"""Odd fields in manifest.json, report.json and failure.json exclude their own facility, by name, and no other."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.aggregation.settings import AggregationSettings
from coordinator.archive.rounds import Archive
from coordinator.config.settings import CoordinatorSettings
from coordinator.report import data as report_data
from coordinator.report.write import write_report
from coordinator.steps.aggregate import close_round
from coordinator.steps.arrived import CollectedRound, sort_out
from coordinator.steps.expectation import Expected
from coordinator.steps.receive import receive
from facility.exchange.errors import ManifestError
from facility.exchange.files.audit_log import HEAD
from facility.exchange.files.durable import new_directory
from facility.exchange.messages import report as reports
from facility.exchange.messages.comparison import KEY as COMPARED
from facility.exchange.messages.dataset_card import DATASET
from facility.exchange.messages.drift import KEY as DRIFT
from facility.exchange.messages.evaluation import SCORES
from facility.exchange.messages.loss_curve import KEY as LOSSES
from facility.exchange.messages.lost_replicas import KEY as LOST
from facility.exchange.messages.manifest import KEEPS, NAME, read_manifest, run_of, with_run, write_manifest
from facility.exchange.messages.privacy import DETAILS as BUDGET
from facility.exchange.messages.report import ACCURACIES, PREDICTED_MEMORY
from facility.exchange.messages.strict_json import read_json
from facility.exchange.messages.usage import USAGE
from tests.pico import save_pico
from tests.security.hostile_facility import make_update

NAMES = ["honest", "odd", "other"]
DEEP = "[" * 100_000 + "]" * 100_000
RAW = [
    DEEP,
    '{"a":' * 5000 + "1" + "}" * 5000,
    "9" * 5000,
    "-" + "9" * 400,
    "1e400",
    "-1e999",
    "NaN",
    "Infinity",
    "-Infinity",
    "null",
    "true",
    '"text"',
    '"\\ud800"',
    '"' + "x" * 2_000_000 + '"',
    '"\\u001b[2J\\u0007"',
    '"[/]"',
    '"../../etc/passwd"',
    '""',
    "[]",
    "{}",
    "[1, [2, [3]]]",
    '{"a": null}',
    "-1",
    "0",
    "1.5",
    "1e308",
    "18446744073709551616",
]
"""JSON texts that stand in the place of one field."""


@pytest.fixture(autouse=True)
def job_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run in a directory of their own, whose neighbours the aggregation step tidies up."""
    place = tmp_path / "engine" / "job"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation's first model in its archive, and sound updates of three facilities to it."""
    root = tmp_path_factory.mktemp("sound")
    save_pico(root / "model", dtype="float32")
    archive = Archive(root / "archive")
    archive.begin(root / "model", "pico")
    for name in NAMES:
        make_update(archive.model_for(0), root / name, federation="pico", facility=name, round=0)
    failed = root / "failed"
    failed.mkdir()
    reports.write(failed, reports.Failure(facility="odd", round=0, reason="the node burnt down"))
    return root


def with_field(text: str, key: str, raw: str) -> str:
    """A JSON object's text with another raw value under `key`, also one that json could not write."""
    value = json.loads(text)
    *parents, last = key.split("/")
    inside = value
    for parent in parents:
        inside = inside[parent]
    inside[last] = "@@@"
    return json.dumps(value).replace('"@@@"', raw)


def keys(file: Path) -> list[str]:
    value = json.loads(file.read_text())
    inner = [f"{key}/{name}" for key, one in value.items() if isinstance(one, dict) for name in one]
    return [*value, *inner, "unknown"]


def odd_copies(sound: Path, place: Path) -> list[tuple[str, str, str]]:
    """Every (file, field, raw value) of the three files."""
    found = []
    for folder, name in (("odd", "manifest.json"), ("odd", "report.json"), ("failed", "failure.json")):
        found += [(f"{folder}/{name}", key, raw) for key in keys(sound / folder / name) for raw in RAW]
    return found


def attempt(sound: Path, place: Path, case: tuple[str, str, str], *, evaluation: bool) -> tuple[Path, bool]:
    """What the receive step leaves of one odd update; and whether it was taken for sound."""
    (file, key, raw) = case
    folder, name = file.split("/")
    odd = place / "odd"
    shutil.copytree(sound / folder, odd)
    text = with_field((odd / name).read_text(), key, raw)
    (odd / name).write_text(text)
    if name == "report.json":  # the manifest covers it, so that only its content is odd
        manifest = json.loads((odd / NAME).read_text())
        content = text.encode()
        manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        (odd / NAME).write_text(json.dumps(manifest))
    failure = receive(
        odd,
        Expected(
            facility="odd",
            round=0,
            model=Archive(sound / "archive").model_for(0),
            evaluation=evaluation,
            settings=AggregationSettings(),
        ),
    )
    if failure is None:
        return odd, True
    assert (failure.facility, failure.round) == ("odd", 0), failure
    assert len(failure.reason) <= 1100 and failure.reason.isprintable(), failure.reason
    assert not failure.again or name == "failure.json"
    with new_directory(place / "out") as temporary:
        reports.write(temporary, failure)
    return place / "out", False


def closes(sound: Path, place: Path, odd: Path) -> dict[str, Any]:
    """The rows that the aggregation step archives with this in the place of facility `odd`."""
    archive = Archive(place / "archive")
    shutil.copytree(sound / "archive", archive.path)
    settings = CoordinatorSettings(federation="pico", rounds=1, facilities=NAMES, final_evaluation=False)
    arrived = sort_out([sound / "honest", odd, sound / "other"], NAMES, 0)
    assert {*arrived.updates, *arrived.failures} == set(NAMES)
    for _ in range(MOST_RESUMES):  # one odd failure does ask for more time, which is granted so often
        close_round(
            CollectedRound(archive=archive, settings=settings, model=archive.model_for(0), number=0, arrived=arrived)
        )
        if archive.rounds():
            break
    return {row.facility: row for row in archive.read_round(0).facilities}


MOST_RESUMES = 20
PARTS = 8
"""All odd files are tried in so many tests."""


@pytest.mark.parametrize("part", ["drawn", *(pytest.param(n, marks=pytest.mark.slow) for n in range(PARTS))])
def test_odd_fields_are_their_own_facilitys_absence(sound: Path, tmp_path: Path, part: str | int):
    """60 drawn ones quickly, and all of them with each round closed."""
    cases = odd_copies(sound, tmp_path)
    assert len(cases) >= 500
    chosen = random.Random(0).sample(cases, 60) if isinstance(part, str) else cases[part::PARTS]
    passed = 0
    for number, case in enumerate(chosen):
        place = tmp_path / str(number)
        place.mkdir()
        left, taken = attempt(sound, place, case, evaluation=number % 5 == 4)
        passed += taken
        if taken and number % 5 == 4:  # an evaluation has no weights to average
            continue
        if taken or part != "drawn" or number % 10 == 0:
            rows = closes(sound, place, left)
            assert rows["honest"].status == rows["other"].status == "ok", (case, rows)
        shutil.rmtree(place)
    assert passed < len(chosen) / 2


@pytest.mark.parametrize("raw", RAW, ids=range(len(RAW)))
def test_what_receive_let_pass_is_still_read_strictly_by_the_aggregation_step(sound: Path, tmp_path: Path, raw: str):
    odd = tmp_path / "odd"
    shutil.copytree(sound / "odd", odd)
    text = with_field((odd / "report.json").read_text(), "tokens", raw)
    (odd / "report.json").write_text(text)
    arrived = sort_out([sound / "honest", odd, sound / "other"], NAMES, 0)
    assert "honest" in arrived.updates and "other" in arrived.updates
    assert raw == "0" or "odd" in arrived.failures, raw


@pytest.mark.parametrize("size", [21_000_000, 1 << 40])
def test_a_large_file_is_refused_before_it_is_read(tmp_path: Path, size: int):
    with open(tmp_path / "failure.json", "wb") as file:
        file.truncate(size)  # sparse: takes no room
    with pytest.raises(ManifestError, match="expected at most"):
        reports.read_failure(tmp_path)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"{}\x00", b'{"a": 1, "a": 2}', b"", b"[]", b'{"a": "\xff"}']
)
def test_only_plain_json_objects_are_read(tmp_path: Path, content: bytes):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ManifestError):
        read_json(tmp_path / "x.json", most_bytes=1000)


def received(sound: Path, update: Path, **changes: Any) -> reports.Failure | None:
    given: dict[str, Any] = {
        "facility": "odd",
        "round": 0,
        "model": Archive(sound / "archive").model_for(0),
        "evaluation": False,
        "settings": AggregationSettings(),
    }
    return receive(update, Expected(**given | changes))


def test_a_failure_in_anothers_name_is_not_believed(sound: Path, tmp_path: Path):
    reports.write(tmp_path, reports.Failure(facility="honest", round=0, reason="gone", again=True))
    failure = received(sound, tmp_path)
    assert failure is not None
    assert (failure.facility, failure.kind, failure.again) == ("odd", "refused", False)
    assert "honest" in failure.reason


def test_what_a_failure_says_of_itself_is_not_taken_over(sound: Path, tmp_path: Path):
    reports.write(tmp_path, reports.Failure(facility="odd", round=0, reason="a\x1b[2Jb [/] \u202e", kind="absent"))
    failure = received(sound, tmp_path)
    assert failure is not None and (failure.facility, failure.kind) == ("odd", "failed")
    assert failure.reason.isprintable()


@pytest.mark.parametrize("change", ["another facility", "another federation", "no report", "link", "another run"])
def test_the_final_evaluation_is_verified_like_an_update(sound: Path, tmp_path: Path, change: str):
    update, model = tmp_path / "evaluation", Archive(sound / "archive").model_for(0)
    update.mkdir()
    manifest = dataclasses.replace(read_manifest(sound / "odd"), files={}, dtypes={}, parameters=0)
    report = reports.read_report(sound / "odd")
    if change == "another facility":
        report = dataclasses.replace(report, facility="honest")
    if change == "another federation":
        report = dataclasses.replace(report, federation="elsewhere")
    if change != "no report":
        reports.write(update, report)
    write_manifest(update, manifest)
    if change == "another run":
        with_run(update, "0" * 32)
    if change == "link":
        (tmp_path / "private").write_text("secret")
        (update / "report.json").unlink()
        (update / "report.json").symlink_to(tmp_path / "private")
    failure = received(sound, update, model=model, evaluation=True)
    assert failure is not None and (failure.facility, failure.kind) == ("odd", "refused"), change
    assert "secret" not in failure.reason
    if change in ("another facility", "another federation"):
        reports.write(update, reports.read_report(sound / "odd"))
        write_manifest(update, manifest)
        assert received(sound, update, model=model, evaluation=True) is None


def test_an_update_of_an_earlier_run_is_not_accepted_again(sound: Path, tmp_path: Path):
    again = Archive(tmp_path / "archive")
    again.begin(sound / "model", "pico")  # the same federation, begun anew from the same weights
    assert run_of(read_manifest(again.model_for(0))) != run_of(read_manifest(Archive(sound / "archive").model_for(0)))
    failure = received(sound, sound / "odd", model=again.model_for(0))
    assert failure is not None and failure.kind == "refused" and "run" in failure.reason
    assert received(sound, sound / "odd") is None


def test_a_facility_that_asks_for_more_time_for_ever_is_left_out(sound: Path, tmp_path: Path):
    archive = Archive(tmp_path / "archive")
    shutil.copytree(sound / "archive", archive.path)
    settings = CoordinatorSettings(federation="pico", rounds=1, facilities=NAMES, final_evaluation=False, come_backs=3)
    asked = reports.Failure(facility="odd", round=0, reason="ran out of time", again=True)
    arrived = dataclasses.replace(sort_out([sound / "honest", sound / "other"], NAMES, 0), failures={"odd": asked})
    for granted in range(4):  # noqa: B007
        _, number, proceed = close_round(
            CollectedRound(archive=archive, settings=settings, model=archive.model_for(0), number=0, arrived=arrived)
        )
        if archive.rounds():
            break
    assert granted == 3 and not proceed
    assert {row.facility: row.status for row in archive.read_round(0).facilities} == {
        "honest": "ok",
        "odd": "failed",
        "other": "ok",
    }


BOUNDS = {
    "largest": (1e4, 1.01e304, 1e9, 1e15),
    "beyond": (1e4, 1.7e308, 1e9, 1e15),
    "smallest": (5e-324, 5e-324, 5e-324, 5e-324),
    "nothing": (0.0, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("bounds", BOUNDS)
def test_figures_at_their_bounds_leave_a_report_that_can_be_read(sound: Path, tmp_path: Path, bounds: str):
    odd = tmp_path / "odd"
    shutil.copytree(sound / "odd", odd)
    loss, perplexity, seconds, rate = BOUNDS[bounds]
    told = json.loads((odd / "report.json").read_text())
    told |= dict.fromkeys(("loss_received", "loss_returned", "training_loss"), loss) | {"tokens_per_second": rate}
    told |= dict.fromkeys(("perplexity_received", "perplexity_returned"), perplexity)
    told["seconds"] = dict.fromkeys(("load", "train", "evaluate", "save"), seconds)
    (odd / "report.json").write_text(json.dumps(told))
    write_manifest(odd, read_manifest(odd))
    failure = received(sound, odd)
    assert (failure is not None) == (bounds == "beyond")
    if failure is not None:
        return
    rows = closes(sound, tmp_path, odd)
    assert {row.status for row in rows.values()} == {"ok"}
    data = report_data.gather(Archive(tmp_path / "archive"), federation="pico", settings={"rounds": 1})
    for kind in ("html", "md"):
        page = write_report(data, tmp_path / "page", kind).read_text()
        assert max(map(len, re.findall(r"[\d,]+", page))) < 80 and 'y="nan' not in page and 'y="inf' not in page


EXTRA = ("message_bytes", USAGE, SCORES, DATASET, KEEPS, HEAD, COMPARED, "decoded", "model_path")
DETAIL_KEYS = (DRIFT, LOSSES, LOST, BUDGET, PREDICTED_MEMORY, *ACCURACIES, "usage", "mfu")


@pytest.mark.parametrize("raw", ['"text"', "[1, [2, [3]]]", '{"a": null}', "1e308", "-1", '"\\u001b[2J\\u0007"'])
def test_what_a_facility_adds_to_its_messages_closes_the_round_and_shows_in_its_reports(
    sound: Path, tmp_path: Path, raw: str
):
    """What the coordinator looks for in `extra` and `details`, all of it odd at once."""
    odd = tmp_path / "odd"
    shutil.copytree(sound / "odd", odd)
    report = json.loads((odd / "report.json").read_text())
    report["details"] = dict.fromkeys(DETAIL_KEYS, "@@@")
    (odd / "report.json").write_text(json.dumps(report).replace('"@@@"', raw))
    manifest = json.loads((odd / NAME).read_text())
    manifest["extra"] |= dict.fromkeys(EXTRA, "@@@")
    content = (odd / "report.json").read_bytes()
    manifest["files"]["report.json"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    (odd / NAME).write_text(json.dumps(manifest).replace('"@@@"', raw))
    failure = received(sound, odd)
    if failure is not None:
        with new_directory(tmp_path / "out") as temporary:
            reports.write(temporary, failure)
    rows = closes(sound, tmp_path, odd if failure is None else tmp_path / "out")
    assert rows["honest"].status == rows["other"].status == "ok", rows["odd"]
    data = report_data.gather(Archive(tmp_path / "archive"), federation="pico", settings={"rounds": 1})
    for kind in ("html", "md"):
        page = write_report(data, tmp_path / "page", kind).read_text()
        assert "\x1b" not in page and len(page) < 400_000
