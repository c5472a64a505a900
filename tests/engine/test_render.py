"""Rendering is deterministic, complete, and the shipped files are what it gives."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from coordinator.config.federation import read_federation
from coordinator.engine.render import render, stale, write
from tests.conftest import ROOT
from tests.federations import write_federation

SHIPPED = ROOT / "workflow" / "federation.yml"


def test_shipped_files_equal_a_fresh_rendering():
    for name, text in render(read_federation(SHIPPED)).items():
        assert (ROOT / name).read_text() == text, f"{name} is stale: run `make render`"


def test_rendering_twice_changes_nothing(tmp_path: Path):
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))
    assert len(write(federation)) > 5
    assert write(federation) == []
    assert stale(federation) == []


def test_the_rendering_does_not_depend_on_where_the_checkout_lies():
    text = "".join(render(read_federation(SHIPPED)).values())
    assert str(ROOT) not in text


def test_no_javascript_anywhere():
    texts = [path.read_text() for path in (ROOT / "cwl").rglob("*.cwl")]
    assert len(texts) == 10
    for text in texts:
        assert "InlineJavascript" not in text and "${" not in text
        for expression in re.findall(r"\$\((.*?)\)", text):
            assert re.fullmatch(r"(self|inputs)(\[\d+\]|\.\w+)+", expression), expression


def test_a_third_facility_is_at_most_ten_lines_in_one_file(tmp_path: Path):
    path = write_federation(tmp_path, ["a", "b"])
    before = read_federation(path)
    write(before)
    hand_written = {p: p.read_bytes() for p in (tmp_path / "cwl").rglob("*.cwl") if p.name != "round.cwl"}
    addition = "- name: third-site.3\n  dataset: ../sites/third/dataset\n"
    text = path.read_text()
    text = text.rstrip() + "\n" + addition if text.rstrip().splitlines()[-1].startswith(("  ", "-")) else text
    assert text.endswith(addition) and addition.count("\n") <= 10
    path.write_text(text)
    write(read_federation(path))
    steps = yaml.safe_load((tmp_path / "cwl" / "round.cwl").read_text())["steps"]
    assert {"train_third-site.3", "receive_third-site.3"} <= set(steps)
    assert all(p.read_bytes() == content for p, content in hand_written.items())


def test_a_facility_that_goes_takes_its_settings_along(tmp_path: Path):
    path = write_federation(tmp_path, ["a", "b"])
    write(read_federation(path))
    described = yaml.safe_load(path.read_text())
    described["facilities"].pop()
    path.write_text(yaml.safe_dump(described))
    write(read_federation(path))
    assert [p.name for p in (path.parent / "facilities").iterdir()] == ["a.json"]


def test_every_dataset_travels_as_text(tmp_path: Path):
    federation = read_federation(write_federation(tmp_path, ["a", "b"]))
    files = render(federation)
    inputs = yaml.safe_load(files["workflow/settings.yml"])
    assert [type(entry["dataset"]) for entry in inputs["facilities"]] == [str, str]
    train = yaml.safe_load((ROOT / "cwl" / "tools" / "train.cwl").read_text())
    assert train["inputs"]["dataset"]["type"] == "string"


def test_checkpoint_manager_is_never_enabled(tmp_path: Path):
    text = render(read_federation(write_federation(tmp_path, ["a"])))["workflow/streamflow.yml"]
    assert "checkpointManager" not in text
