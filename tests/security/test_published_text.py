"""What a facility tells lands in model card, crate and Croissant cards as text under its own name, or not at all."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.archive.rounds import Archive
from coordinator.publishing.publish import publish
from coordinator.report.markdown import table
from facility.exchange.errors import ManifestError
from facility.exchange.messages.comparison import tasks_of
from facility.exchange.messages.dataset_card import dataset_of
from facility.exchange.messages.evaluation import scores_of
from facility.exchange.messages.manifest import Manifest
from facility.rounds.evaluation import scores_in
from tests.publishing.made import ODD, hostile_federation, made_federation

EVIL = [
    "](http://e.example) <b>",
    "<script>alert(1)</script>",
    "`x` | y",
    "acc\u202ecca",
    "../../x",
    "file:///x",
    "\x1b[2J",
]


def told(**extra: Any) -> Manifest:
    return Manifest(kind="update", federation="f", round=0, extra=extra)


@pytest.mark.parametrize("text", EVIL)
def test_what_a_facility_tells_is_no_markup_and_no_link_in_what_is_published(text: str):
    counts = {"blocks": 1, "documents": 2, "tokens": 3, "sha256": "a" * 64}
    sound = {"task": "causal-lm", "block_tokens": 16, "splits": {"train": counts}}
    assert dataset_of(told(dataset=sound)) == sound
    assert dataset_of(told(dataset=sound | {"task": text})) == {}
    assert dataset_of(told(dataset=sound | {"splits": {text: counts}})) == {}
    score = {"task": "arc_easy", "metric": "acc_norm", "value": 0.5, "stderr": None}
    assert scores_of(told(scores={"results": [score]})) == {"results": [score]}
    for key in ("task", "metric"):
        assert scores_of(told(scores={"results": [score | {key: text}]})) == {}
        with pytest.raises(ManifestError):
            tasks_of(told(comparison={"tasks": [score | {key: text, "model": "global"}]}), ["global"])


def test_every_figure_that_lm_eval_makes_is_taken():
    """Names as its tasks and filters have them: gsm8k, humaneval, squad."""
    keys = ["acc,none", "exact_match,strict-match", "exact_match,flexible-extract", "pass@1,create_test", "f1,none"]
    made = scores_in({"gsm8k": dict.fromkeys(keys, 0.5), "leaderboard_math_hard": {"rouge1_max,none": 0.25}})
    results = [dataclasses.asdict(score) for score in made]
    assert len(results) == 6 and scores_of(told(scores={"results": results})) == {"results": results}
    tasks = [{"model": "global"} | one for one in results]
    assert tasks_of(told(comparison={"tasks": tasks}), ["global"]) == tasks


def test_a_cell_of_a_table_is_text():
    said = "`code` &lt;b&gt; http://e.example www.e.example a@e.example [x](y) | <b> *c*"
    line = table(["a"], [[said]])[2]
    for mark in ("://", "www.e", "a@", " [x]", " <b>", " |  ", " &lt", " `", " *c"):
        assert mark not in line.removesuffix(" |"), (mark, line)
    assert line.replace("\\", "") == f"| {said} |"


def changed(root: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Every archived round's rows of facilities, changed."""
    archive = Archive(root / "archive")
    for number in range(3):
        path = archive.round_directory(number) / "round.json"
        record = json.loads(path.read_text())
        change(record["facilities"])
        path.write_text(json.dumps(record))


def test_no_facility_stands_in_anothers_place_in_the_crate(tmp_path: Path):
    """One is called as another would be that wants no name; two return the same weights; a person is called `run`."""

    def change(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["facility"] = {"facility-00": "facility-2"}.get(row["facility"], row["facility"])
            row["dataset"] = rows[0]["dataset"]
        for row in rows[:2]:
            row["update_sha256"] = "c" * 64

    path = made_federation(tmp_path)
    text = path.read_text().replace("facility-00", "facility-2").replace("Josiah Carberry", "run")
    text = text.replace('"orcid": "0000-0002-1825-0097", ', "").replace("Brown University", "crossfed")
    path.write_text(text.replace("{name: facility-01,", "{name: facility-01, public: {dataset_card: true},"))
    changed(tmp_path, change)
    crate = publish(path, tmp_path / "out") / "crate"
    assert [one.name for one in sorted((crate / "croissant").iterdir())] == ["facility-2.json", "facility-3.json"]
    graph = json.loads((crate / "ro-crate-metadata.json").read_text())["@graph"]
    entities = {one["@id"]: one for one in graph}
    assert len(entities) == len(graph) and not [one for one in entities if ".." in one or one.startswith("file:")]
    assert {one for one in entities if one.startswith("#site-")} == {f"#site-facility-{n}" for n in (2, 3, 4)}
    assert entities["#run"]["@type"] == "CreateAction" and entities["#crossfed"]["@type"] == "SoftwareApplication"
    assert entities["#person-run"]["name"] == "run" and entities["#institution-crossfed"]["name"] == "crossfed"
    same = entities[f"urn:sha256:{'c' * 64}"]
    assert {"update of facility-2, round 0", "update of facility 3, round 0"} <= {same["name"], *same["alternateName"]}


URI = re.compile(
    r"(?:#|[A-Za-z][A-Za-z0-9+.-]*:|\./|[A-Za-z0-9_])(?:[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*"
)
"""RFC 3986, section 2 and appendix A: letters of which a reference may consist."""


def references(value: Any) -> list[str]:
    """Every `@id` within."""
    if isinstance(value, list):
        return [found for one in value for found in references(one)]
    if not isinstance(value, dict):
        return []
    own = [value["@id"]] if "@id" in value else []
    return own + [found for one in value.values() for found in references(one)]


def test_every_entity_of_a_crate_has_an_address_of_its_own_whatever_names_are_given(tmp_path: Path):
    """What roc-validator asks for by `make readme`, as laws: references are URIs, have an entity, and keep names."""
    crate = publish(hostile_federation(tmp_path), tmp_path / "out") / "crate"
    graph = json.loads((crate / "ro-crate-metadata.json").read_text())["@graph"]
    entities = {one["@id"]: one for one in graph}
    assert len(entities) == len(graph)
    for name in references(graph):
        assert name in ("./", "ro-crate-metadata.json") or URI.fullmatch(name) and len(name) < 250, name
    local = [name for name in references(graph) if name.startswith("#") or ":" not in name]
    assert set(local) <= set(entities)
    people = [one for one in graph if one["@type"] == "Person"]
    places = [one for one in graph if one["@type"] == "Organization" and one["@id"].startswith("#institution-")]
    assert {one["name"] for one in people} >= set(ODD) and {one["name"] for one in places} >= set(ODD)
    assert entities["#run"]["@type"] == "CreateAction" and entities["#crossfed"]["@type"] == "SoftwareApplication"
    assert {"#site-run", "#site-crossfed", "#site-ro-crate-metadata.json"} <= set(entities)
    for one in graph:
        assert one.get("name", "x") and isinstance(one["@type"], str | list)


def test_a_croissant_card_has_what_the_format_asks_for_whatever_a_facility_says(tmp_path: Path):
    """As mlcroissant checks it: a name, an address of a licence, files with address, kind and digest."""
    crate = publish(hostile_federation(tmp_path), tmp_path / "out") / "crate"
    cards = sorted((crate / "croissant").glob("*.json"))
    assert [one.stem for one in cards] == ["crossfed", "ro-crate-metadata.json", "run"]
    for path in cards:
        card = json.loads(path.read_text())
        assert re.fullmatch(r"[A-Za-z0-9._-]+", card["name"]) and card["conformsTo"].startswith("http")
        assert card["@context"]["@language"] == "en", "without it Croissant's own library reads no card"
        for file in card["distribution"]:
            assert URI.fullmatch(file["@id"]) and re.fullmatch("[0-9a-f]{64}", file["sha256"])
