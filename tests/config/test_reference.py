"""`crossfed explain`, the reference pages and the schema are made from the declaration and leave nothing out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from coordinator.cli import main
from coordinator.config.reference import explain_key, key_tree, keys, section_pages
from coordinator.config.scaffold import write_scaffold
from coordinator.config.schema import FIRST_LINE, NAME, schema, schema_text
from facility.exchange.errors import InputError
from tests.conftest import ROOT
from tests.distributed import Started


def test_every_key_is_documented():
    assert [key.path for key in keys() if not key.text] == []
    assert len({key.path for key in keys()}) == len(list(keys())) > 150


def test_the_text_of_a_key_is_understood_without_the_key_before_it():
    """`crossfed explain KEY` and an editor show one text alone."""
    refers = re.compile(
        r"(The same|Those|These|Its|It|They|That|As it|Of|Each \w+ derives)\b|[^.;]*\b(multiple of them|are not:)"
    )
    assert [key.path for key in keys() if refers.match(" ".join(key.text.split()))] == []
    assert refers.match("The same, as a multiple") and refers.match("With `auto`: the most, as a multiple of them.")


def test_a_key_is_explained_by_what_is_declared():
    text = explain_key("training.sync.policy")
    assert "'partial_reduce'" in text and 'default: "allreduce"' in text
    assert "range:   more than 0" in explain_key("training.learning_rate")
    assert "unit:    seconds" in explain_key("facilities[3].deployment.retry_seconds")
    assert explain_key("facilities.training.steps") == explain_key("training.steps")
    assert "none: required" in explain_key("rounds") and "policy: one of" in explain_key("training.sync")
    assert "  rule: text" in key_tree()


@pytest.mark.parametrize(
    ("key", "close"),
    [
        ("policy", "did you mean training.sync.policy?"),
        ("training.stepz", "did you mean 'training.steps'?"),
        ("nothing at all", "`crossfed explain` lists all keys"),
    ],
)
def test_an_unknown_key_names_close_ones(key: str, close: str):
    with pytest.raises(InputError) as caught:
        explain_key(key)
    assert close in str(caught.value)


def test_the_commands(tmp_path: Path):
    def crossfed(*words: str) -> subprocess.CompletedProcess[str]:
        return Started("coordinator.cli", [*words], tmp_path, dict(os.environ)).ended()

    assert "nesterov" in crossfed("explain", "aggregation.rule").stdout
    assert crossfed("explain", "aggregation.rul").returncode == 2
    assert crossfed("schema").stdout == schema_text()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["status", "federation.yml"], "unexpected extra argument"),
        (["explaim"], "explain"),
        (["rewind"], "Missing option"),
        (["report", "--formt", "md"], "--format"),
    ],
)
def test_words_that_no_command_takes_are_an_error_without_a_traceback(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "argv", ["crossfed", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    written = capsys.readouterr().err
    assert stop.value.code == 2 and told in written and "Traceback" not in written


def test_each_page_holds_its_keys():
    made = section_pages()
    for key in keys():
        assert sum(f"### `{key.path}`\n" in text for text in made.values()) == 1, key.path
    assert "### `aggregation.rule`" in made["aggregation"] and "### `facilities[].name`" in made["facilities"]


def test_the_shipped_schema_is_the_declarations():
    assert (ROOT / "workflow" / NAME).read_text() == schema_text(), "run `crossfed schema --out workflow/" + NAME + "`"
    assert (ROOT / "workflow" / "federation.yml").read_text().startswith(FIRST_LINE)


def test_the_schema_accepts_what_is_valid_and_refuses_what_is_not(tmp_path: Path):
    described = yaml.safe_load((ROOT / "workflow" / "federation.yml").read_text())
    described["training"]["learning_rate"] = float(described["training"]["learning_rate"])  # YAML 1.1 has it as text
    check = jsonschema.Draft202012Validator(schema())
    assert list(check.iter_errors(described)) == []
    described["facilities"][0]["deployment"] = "local"
    assert list(check.iter_errors(described)) == []
    for wrong in ({"roundz": 1}, {"rounds": 0}, {"name": "../x"}, {"training": {"stepz": 1}}, {"seed": "1"}):
        assert list(check.iter_errors(described | wrong)), wrong


def test_a_scaffold_brings_its_schema(tmp_path: Path):
    file = write_scaffold(tmp_path, "two", ["a=local", "b=slurm"])
    assert file.read_text().startswith(FIRST_LINE)
    assert json.loads(file.with_name(NAME).read_text()) == schema()
