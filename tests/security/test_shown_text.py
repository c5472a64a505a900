"""A facility's text is displayed as text: no markup, terminal commands, page elements or flood."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from rich.console import Console

from coordinator.archive.rounds import Archive
from coordinator.archive.summary import summary
from coordinator.archive.table import has_accuracy, table
from coordinator.config.federation import Facility, FederationFile
from coordinator.engine.history import History
from coordinator.engine.live import Snapshot, live_table
from coordinator.engine.progress import Progress
from coordinator.engine.run import Run, _picture
from coordinator.events.event import Event, quote_for_display
from coordinator.plan import read_profile
from coordinator.problem.read import read_problem
from coordinator.report import data as report_data
from coordinator.report.write import write_report
from coordinator.shown_text import safe_line
from coordinator.simulation.described import read_scenario
from coordinator.steps import report as report_step
from facility.exchange.errors import ConfigurationError
from facility.exchange.logs import configure_logging
from facility.exchange.messages import report as reports
from facility.exchange.messages.settings import read_facility_settings
from facility.prepare import main as prepare_command
from facility.training.monitor.logs import start_logging
from facility.training.monitor.tracker import Tracker
from facility.training.processes.ranks import Ranks
from tests.planning.cases import whole
from tests.preparing.chats import save_chat_tokenizer
from tests.preparing.corpora import write_json_lines

HOSTILE = {
    "a closing tag": "[/] [/red] [bold]",
    "terminal commands": "\x1b[2J\x1b]0;title\x07\x9b31m\rgone",
    "a page element": "<script>alert(1)</script>",
    "30 MB": "[/x]" * 7_500_000,
}


def row(reason: str) -> dict[str, object]:
    return {
        "round": 0,
        "facility": "odd",
        "status": "refused",
        "reason": reason,
        "tokens": 0,
        "seconds": 0.0,
        "tokens_per_second": 0.0,
        "weight": 0.0,
        "perplexity_received": None,
        "perplexity_returned": None,
    }


def printed(*things: object) -> str:
    console = Console(file=io.StringIO(), width=140, force_terminal=False)
    for thing in things:
        console.print(thing)
    return console.file.getvalue()  # type: ignore[attr-defined]


def federation(reason: str, place: Path) -> dict[str, object]:
    data = summary(Archive(place))
    data["rounds"] = [
        {"round": 0, "global_perplexity": 3.0, "global_perplexity_over": ["odd"], "facilities": [row(reason)]}
        | {"decision": "go on", "finished": "", "attempts": 1}
    ]
    return data | {"stopped": reason, "federation": "f", "final_evaluation": [row(reason)]}


@pytest.mark.parametrize("case", HOSTILE)
def test_tables_show_reasons_as_text(case: str, tmp_path: Path):
    reason, begun = HOSTILE[case], time.process_time()
    live = Progress(["odd"], 2)
    live.feed(Event(kind="refused", fields={"facility": "odd", "round": 0, "reason": reason}))
    text = printed(table(federation(reason, tmp_path)), _picture(live, History(Archive(tmp_path))))
    assert text.isascii() or all(letter == "\n" or letter.isprintable() for letter in text)
    assert "\x1b" not in text and len(text) < 200_000
    if case != "30 MB":
        assert text.replace("\n", "").count(reason[:4].replace("\x1b", "?")) >= 3
    assert time.process_time() - begun < 100


MARKS = {
    "above": "e" + "\u0301" * 5000,
    "around": "x\u0489" * 2 + "\u0489" * 300,
    "selectors": "a" + "\ufe0f\U000e0100" * 99,
}
UNSEEN = {"filler": "\u3164" * 100, "blank": "\u2800" * 100, "joiner": "\u200b\u2060\ufeff", "override": "\u202eb"}


@pytest.mark.parametrize("text", (MARKS | UNSEEN).values(), ids=(MARKS | UNSEEN).keys())
def test_no_letter_grows_over_the_lines_of_others_or_is_not_seen(text: str):
    live = Progress(["odd", "sound"], 2)
    line = live.feed(Event(kind="refused", fields={"facility": "odd", "round": 0, "reason": quote_for_display(text)}))
    told = {"facility": "sound", "host": "h", "reason": quote_for_display(text)}
    pages = [
        line,
        live.feed(Event(kind="login_refused", fields=told)),
        safe_line(text),
        printed(live_table(_now(live))),
    ]
    for page in pages:
        assert page is not None and not re.search("[\u3164\u2800\ufe0f\u200b\u2060\ufeff\u202e]", page)
        runs = re.sub("[^\u0300-\u036f\u0489]+", " ", page).split()
        assert max(map(len, runs), default=0) <= 3
    assert safe_line("Zür\u0301ich \u05e9\u05c1\u05bc ไม่ได้ 東京") == "Zür\u0301ich \u05e9\u05c1\u05bc ไม่ได้ 東京"


def _now(live: Progress) -> Snapshot:
    return Snapshot(federation="f", heading="h", coordinator="c", time=time.time(), facilities=live.live)


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("kind", ["html", "md"])
def test_the_report_shows_reasons_as_text(case: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def written(reason: str) -> str:
        monkeypatch.setattr(report_data, "summary_of", lambda *read: federation(reason, tmp_path))
        data = report_data.gather(Archive(tmp_path), federation="f", settings={"rounds": 1})
        return write_report(data, tmp_path / "report", kind).read_text()

    page, harmless = written(HOSTILE[case]), written("harmless")
    assert "alert(1)</script>" not in page and "\x1b" not in page and "\x9b" not in page
    assert len(page) < len(harmless) + 20_000


@pytest.mark.parametrize("case", HOSTILE)
def test_the_report_step_says_why_it_stopped_in_one_line(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "coordinator.json").write_text('{"federation": "f", "rounds": 1, "facilities": ["odd"]}')
    monkeypatch.setattr(report_step, "summary", lambda archive: federation(HOSTILE[case], tmp_path))
    arguments = ["--federation", str(tmp_path / "coordinator.json"), "--archive", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["report", *arguments, "--out", str(tmp_path / "out.json")])
    assert report_step.main() == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and len(said.err) < 3000
    assert "\x1b" not in said.err + said.out and "\x9b" not in said.err + said.out


@pytest.mark.parametrize(("claims", "classifies"), [((0.5, None, None), False), ((0.5, 0.6, None), True)])
def test_one_facility_that_claims_an_accuracy_makes_no_model_a_classifier(
    claims: tuple[float | None, ...], classifies: bool
):
    """The model card's task, the report's columns and titles follow from this."""
    rows = [row("") | {"perplexity_received": 2.0, "accuracy_received": claim} for claim in claims]
    lost = [row("gone") | {"accuracy_received": None}]
    assert has_accuracy({"rounds": [{"facilities": [*rows, *lost]}], "final_evaluation": []}) == classifies


def test_no_facility_takes_the_global_models_place_in_curves_and_tables():
    facilities = [Facility(name=name, dataset="data") for name in ("alpha", "Global")]
    with pytest.raises(ConfigurationError, match="'Global' has the name under which curves"):
        FederationFile(name="f", model="m", rounds=1, facilities=facilities)


ALONE = Ranks(rank=0, world=1, local_rank=0, local_world=1, device=torch.device("cpu"))
COMMANDS = "\x1b]52;c;eA==\x07\x9b2J\r\u202e"
FORGED = f"{COMMANDS}\n12:00:00 INFO facility.round: all is well"
SETTINGS = {
    "an unknown key": {"training": {FORGED: 1}},
    "a key of a mapping": {"masking": {"facilities": ["a"], "signers": {FORGED: 1}}},
    "an optimizer's": {"training": {"optimizer_parameters": {FORGED: [None]}}},
    "a value": {"training": {"optimizer": FORGED}},
    "its name": {"facility": FORGED},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_of_a_coordinator_write_no_line_of_their_own_in_a_facilitys_log(case: str, tmp_path: Path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"federation": "f", "facility": "a", "rounds": 1} | SETTINGS[case]))
    with pytest.raises(ConfigurationError) as caught:
        read_facility_settings(path)
    assert str(caught.value).isprintable()


def test_what_a_job_logs_of_its_settings_moves_no_cursor(tmp_path: Path):
    """Whoever reads the job's output at the facility reads it on a terminal."""
    (tmp_path / "settings.json").write_text(json.dumps({"training": {FORGED: 1}}))
    words = ["--model", "m", "--dataset", "d", "--settings", "settings.json", "--round", "0", "--out", "out"]
    done = subprocess.run([sys.executable, "-m", "facility.round", *words], cwd=tmp_path, capture_output=True)
    said = (done.stdout + done.stderr).decode()
    assert said.endswith("\n") and said[:-1].isprintable() and "is a key that is unknown here" in said


@pytest.mark.parametrize("of", ["commands", "the trainer"])
def test_a_log_shows_what_others_wrote_as_text(
    of: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    logger = logging.getLogger("facility")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    configure_logging() if of == "commands" else start_logging(ALONE, "a")
    logger.warning("a library said: %s\tthen\nthis", COMMANDS)
    said = capsys.readouterr().err
    assert said.endswith("\\x1b]52;c;eA==\\x07\\x9b2J\\r\\u202e\tthen\nthis\n")


def test_documents_that_anybody_may_have_written_move_no_cursor_as_they_are_prepared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Data sets of the hub are; and of a wrong field a class is a document, which `crossfed setup` would show."""
    classes = [f"{COMMANDS}{number}" for number in range(2)] + ["private words " * 7]
    records = [{"text": f"{COMMANDS} hello {number}", "label": classes[number % 3]} for number in range(30)]
    source = write_json_lines(tmp_path / "all.jsonl", records)
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    options = ["--task", "classification", "--validation-share", "0.2", "--block-tokens", "64", "--show", "2"]
    words = ["--input", str(source), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]
    assert not prepare_command([*words, *options])
    said = capsys.readouterr().out
    assert all(letter.isprintable() or letter == "\n" for letter in said)
    assert "--- block 0" in said and "3 classes: \\x1b]52" in said and "private" not in said


@pytest.mark.parametrize("place", ["a device", "a key", "deep"])
@pytest.mark.parametrize("read", [read_problem, read_profile, read_scenario])
def test_what_a_facility_measured_names_no_device_by_a_command_of_the_terminal(
    read: Callable[[Path], object], place: str, tmp_path: Path
):
    """`crossfed plan` and the simulators show names of a profile.json that was made at a facility."""
    raw = whole()
    for odd in ("\x1b]52;c;eA==\x07", "host\u202e1", "a\u0301\u0301\u0301\u0301\u0301", "\u3164"):
        changed = {
            "a device": raw | {"devices": [raw["devices"][0] | {"id": odd}, *raw["devices"][1:]]},
            "a key": raw | {odd: 1},
            "deep": raw | {"profile": json.loads('{"a": [' * 400 + json.dumps(odd) + "]}" * 400)},
        }[place]
        (tmp_path / "profile.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigurationError, match="profile.json: holds the text .*, expected printable") as caught:
            read(tmp_path / "profile.json")
        assert str(caught.value).isprintable()


def test_the_engines_log_shows_what_jobs_printed_as_text():
    """StreamFlow quotes them, and `tail -f` shows the file that a run names first."""
    sink = io.StringIO()
    run = SimpleNamespace(sink=sink)
    Run.write_line(run, f"2026-01-01 00:00:00.000 ERROR    FAILED Job /a: {COMMANDS}\tthen")  # type: ignore[arg-type]
    assert sink.getvalue().endswith("\\x1b]52;c;eA==\\x07\\x9b2J\\r\\u202e\tthen\n")


def test_the_login_of_a_sites_tracker_is_in_no_log_and_no_failure_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """mlflow's error names the address that the site has set, and a job's log and failure go to the coordinator."""

    class Unreachable:
        requires_logging_directory = False

        def __init__(self, run: str) -> None:
            raise OSError("API request to https://alice:canary@mlflow.site/api/2.0 failed")

    logger = logging.getLogger("facility")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", Unreachable)
    start_logging(ALONE, "a")
    try:
        tracker = Tracker("mlflow", tmp_path, "run", ALONE)
        logger.warning("%s", tracker.reason)
        raise OSError(tracker.reason)
    except OSError as error:
        logger.exception("it failed")
        reports.write(tmp_path, reports.Failure(facility="a", round=0, reason=str(error), log_tail=tracker.reason))
    said = capsys.readouterr().err
    left = reports.read_failure(tmp_path)
    assert left is not None
    for text in (said, left.reason, left.log_tail):
        assert "canary" not in text and "https://***@mlflow.site/api/2.0 failed" in text
