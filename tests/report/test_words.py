"""Laws of words: every surface names what a task counts and measures, and no other task's unit or metric."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from coordinator.archive.rounds import Archive, FacilityRow
from coordinator.archive.summary import summary
from coordinator.archive.table import table
from coordinator.archive.task import task_of, task_of_rows
from coordinator.comparison.matrix import matrix
from coordinator.engine.history import History
from coordinator.engine.live import FacilityState, Snapshot, live_lines, live_table
from coordinator.engine.progress import Progress
from coordinator.engine.run import _picture
from coordinator.publishing.card import evaluations
from coordinator.report.data import gather
from coordinator.report.markdown import markdown
from coordinator.report.page import page
from coordinator.report.trackers import curves
from facility.contract import Call
from facility.exchange.files.durable import write_json
from facility.exchange.messages import report
from facility.exchange.task_words import KNOWN, WORDS, words_of
from tests.comparison.made import add_comparison
from tests.report.made import made_archive

TOLD = [task for task in KNOWN if task != "causal-lm"] + ["causal-lm"]
FOREIGN = {
    True: r"\bimages?\b|\bpairs\b|\bexamples\b|DPO",
    False: r"perplexit|\btokens?\b",
}


def archive_of(root: Path, task: str) -> Archive:
    """A made federation whose facilities tell `task`, with 100 rows of 10 tokens in each update."""
    archive = made_archive(root, facilities=3, rounds=2)
    for file in archive.path.glob("round-*/round.json"):
        entry = json.loads(file.read_text())
        for row in entry["facilities"]:
            if row["status"] == "ok":
                row |= {"task": task, "samples": 100, "tokens": 1000}
        file.write_text(json.dumps(entry))
    return archive


def printed(table_: object) -> str:
    console = Console(width=300, record=True, file=open("/dev/null", "w"))
    console.print(table_)
    return console.export_text()


def visible(html: str) -> str:
    """What a reader of the page sees, without the settings and artefacts."""
    return re.sub(r"<style>.*?</style>|<[^>]*>", " ", html, flags=re.S).partition("Settings and versions")[0]


@pytest.mark.parametrize("task", TOLD)
def test_every_surface_speaks_of_what_the_task_counts(tmp_path: Path, task: str):
    archive, words = archive_of(tmp_path / "a", task), words_of(task)
    add_comparison(archive, ["facility-00", "facility-01", "facility-02"])
    data = gather(archive, federation="made", settings={"rounds": 2})
    assert data["task"] == task
    live = Snapshot(
        federation="f",
        heading="h",
        coordinator="c",
        time=0.0,
        unit=words.live_unit,
        facilities={"a": FacilityState(state="training", stage="training", tokens_per_second=5.0)},
    )
    progress = Progress(["a"], 2)
    surfaces = {
        "table": printed(table(summary(archive))),
        "terminal": printed(_picture(progress, History(archive))),
        "page": visible(page(data)),
        "markdown": markdown(data).partition("## Versions")[0],
        "matrix": str(matrix(archive, {}, data["facilities"], words)["verdicts"]),
    }
    for name, text in surfaces.items():
        if name != "matrix":
            assert words.metric in text.replace(words.metric.capitalize(), words.metric), name
        if words.by_row:
            found = re.search(FOREIGN[False], text.replace("tokens/s", ""))
            assert not found, (name, text[max(0, found.start() - 80) : found.end() + 40])
        elif words.exponential:
            assert not re.search(FOREIGN[True], text), name
        else:
            assert "perplexit" not in text, name
    assert words.nats in surfaces["matrix"]
    count = 100 if words.by_row else 1000
    sound = sum(row["status"] == "ok" for entry in data["rounds"] for row in entry["facilities"])
    assert f"<b>{count * sound:,}</b>{words.unit} trained on" in page(data)
    assert (
        f"{words.live_unit}/s" in printed(live_table(live, 1.0)) and f"{words.live_unit}/s" in live_lines(live, 1.0)[0]
    )
    assert words.unit in curves(archive.history()[0])["global"]


@pytest.mark.parametrize("task", sorted(WORDS))
def test_the_card_gives_the_loss_that_the_perplexity_stands_for(tmp_path: Path, task: str):
    data = gather(archive_of(tmp_path / "a", task), federation="made", settings={"rounds": 2})
    last = data["rounds"][-1]["facilities"]
    found = evaluations(data | {"model_round": 0}, {})
    expected = [row["perplexity_received"] for row in last if row["status"] == "ok"]
    told = [one.metric_value for one in found if one.metric_type == words_of(task).metric]
    if not words_of(task).exponential:
        expected = [math.log(one) for one in expected]
    assert told == pytest.approx(expected, abs=1e-4) and len(told) > 1
    assert {one.task_type for one in found} == {words_of(task).hub_task}


def row(name: str, task: str, status: str = "ok") -> FacilityRow:
    return FacilityRow(round=0, facility=name, status=status, task=task)


def test_one_facility_among_several_changes_no_word():
    assert task_of_rows([row("a", "image-classification"), row("b", "causal-lm"), row("c", "chat")]) == "causal-lm"
    assert task_of_rows([row("a", "image-classification"), row("b", ""), row("c", "")]) == ""
    assert task_of_rows([row("a", "preference"), row("b", "preference", "refused")]) == "preference"
    told = {name: 1.0 for name in ("loss_received", "loss_returned", "training_loss")}
    one = report.Report(
        federation="f",
        facility="a",
        round=0,
        samples=1,
        tokens=1,
        steps=1,
        perplexity_received=2.7,
        perplexity_returned=2.7,
        details={"task": "<script>"},
        **told,
    )
    assert (
        report.task_reported(one) == ""
        and report.task_reported(dataclasses.replace(one, details={"task": ["chat"]})) == ""
    )


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("ViTForImageClassification", "image-classification"),
        ("BertForSequenceClassification", "classification"),
        ("LlamaForCausalLM", "causal-lm"),
    ],
)
def test_before_any_report_the_models_class_says_what_is_counted(tmp_path: Path, name: str, task: str):
    (tmp_path / "initial" / "model").mkdir(parents=True)
    write_json(tmp_path / "initial" / "model" / "config.json", {"architectures": [name]})
    assert task_of(Archive(tmp_path), []) == task


def test_an_own_trainers_seconds_are_told_and_none_are_shown_as_none(tmp_path: Path):
    places: dict[str, Any] = {name: tmp_path for name in ("model", "dataset", "out", "state")}
    rest: dict[str, Any] = {"base": None, "settings": None, "round": 0, "signals": []}
    call = Call(**places, **rest, began=10.0, stepped=[14.0, 16.0, 18.0])
    object.__setattr__(call, "settings", type("S", (), {"training": type("T", (), {"steps": 3}), "rounds": 2})())
    seconds = call._seconds(20.0)
    assert (seconds.load, seconds.train, seconds.evaluate) == (2.0, 6.0, 2.0)
    assert call._speed(300) == 50.0
    archive = archive_of(tmp_path / "a", "own")
    data = summary(archive)
    for entry in data["rounds"]:
        for one in entry["facilities"]:
            one["seconds"] = 0.0
    text = printed(table(data))
    assert " 0.0 " not in text and "loss received" in text
