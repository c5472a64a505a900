"""A crate is valid by the community's own validator, agrees with another engine's record, and suffices to start over.

By `make readme`, and so by .ci/run: the validator is installed from the package index into its own environment.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.publishing.publish import publish
from tests.conftest import ROOT
from tests.engine.engines import cwltool
from tests.federations import write_federation
from tests.publishing.cwlprov import trained
from tests.publishing.made import MOST_BYTES, PEOPLE, hostile_federation, made_federation
from tests.publishing.validator import Validator

pytestmark = [pytest.mark.readme, pytest.mark.timeout(900)]
NAMES = ("alder", "birch")
PROFILES = ("workflow-run-crate", "process-run-crate")


@pytest.fixture(scope="module")
def validator(tmp_path_factory: pytest.TempPathFactory) -> Validator:
    return Validator(tmp_path_factory.mktemp("validator"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small federation that cwltool ran, with its own record in `record/`, published in `out/`."""
    root = tmp_path_factory.mktemp("ran")
    about = {"title": "Pico", "license": "apache-2.0", "creators": PEOPLE}
    path = write_federation(root / "first", list(NAMES), **about)
    text = path.read_text()
    for name in NAMES:
        text = text.replace(f"- name: {name}\n", f"- name: {name}\n  public: {{named: true, dataset_card: true}}\n")
    path.write_text(text)
    write_rendered(read_federation(path))
    result = cwltool(path, root / "engine", "--provenance", root / "record", timeout=600)
    assert result.returncode == 0, result.stdout[-4000:]
    publish(path, root / "out")
    return root


@pytest.fixture(scope="module")
def again(ran: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The crate elsewhere, with the initial model and the datasets where it says; its commands have run."""
    root = tmp_path_factory.mktemp("again")
    folder = root / "crate"
    shutil.copytree(ran / "out" / "crate", folder)
    shutil.copytree(ran / "first" / "model", folder / "model")
    for name in NAMES:
        shutil.copytree(ran / "first" / "sites" / name / "dataset", folder / "datasets" / name)
    commands = re.search(r"```bash\n(.*?)```", (folder / "reproduce.md").read_text(), re.S)
    assert commands is not None
    crossfed = root / "bin" / "crossfed"
    crossfed.parent.mkdir()
    crossfed.write_text(f'#!/bin/sh\nexec {sys.executable} -m coordinator.cli "$@"\n')
    crossfed.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{crossfed.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(root),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands[1]], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


def graph(crate: Path) -> list[dict[str, Any]]:
    return json.loads((crate / "ro-crate-metadata.json").read_text())["@graph"]


def assert_valid(crate: Path, validator: Validator) -> None:
    for profile in PROFILES:
        result = validator.validate(crate, profile)
        assert result.returncode == 0, result.stdout + result.stderr
    assert sum(path.stat().st_size for path in crate.rglob("*") if path.is_file()) < MOST_BYTES


def test_the_crate_of_a_federation_with_failures_is_valid(validator: Validator, tmp_path: Path):
    assert_valid(publish(made_federation(tmp_path), tmp_path / "out") / "crate", validator)


def test_the_crate_of_a_federation_with_the_oddest_names_is_valid(validator: Validator, tmp_path: Path):
    """The laws behind it are in the default suite: tests/security/test_published_text.py."""
    assert_valid(publish(hostile_federation(tmp_path), tmp_path / "out") / "crate", validator)


def test_the_validator_finds_what_is_missing(validator: Validator, tmp_path: Path):
    """What passes above passes because it is right: without its main workflow the same crate fails."""
    crate = publish(made_federation(tmp_path), tmp_path / "out") / "crate"
    told = json.loads((crate / "ro-crate-metadata.json").read_text())
    for entity in told["@graph"]:
        entity.pop("mainEntity", None)
    (crate / "ro-crate-metadata.json").write_text(json.dumps(told))
    result = validator.validate(crate, PROFILES[0])
    assert result.returncode != 0 and "Main Workflow" in result.stdout


def test_the_crate_of_a_run_without_events_is_valid(validator: Validator, ran: Path):
    assert_valid(ran / "out" / "crate", validator)


def test_models_and_updates_are_those_that_cwltool_recorded(ran: Path, tmp_path: Path):
    """Digests of the crate's actions against the files that `cwltool --provenance` kept of the same run."""
    entities = {one["@id"]: one for one in graph(ran / "out" / "crate")}
    actions = {
        (number, name): (
            entities[entities[f"#round-{number}-{name}"]["object"]["@id"]]["sha256"],
            entities[entities[f"#round-{number}-{name}"]["result"]["@id"]]["sha256"],
        )
        for number in range(2)
        for name in NAMES
    }
    recorded = trained(ran / "record", tmp_path)
    assert actions == {key: recorded[key] for key in actions}
    assert len({digest for pair in actions.values() for digest in pair}) == 6  # two models, four updates


def test_the_last_model_is_made_again_from_the_crate_alone(again: Path, validator: Validator):
    """The crate's own commands give the same digest, for the last one compares it; what they ran can be published."""
    text = (again / "reproduce.md").read_text()
    expected = text.split("--expect ")[1].split()[0]
    published = graph(publish(again / "workflow" / "federation.yml", again.parent / "out") / "crate")
    run = next(one for one in published if one["@id"] == "#run")
    assert f"urn:sha256:{expected}" in [one["@id"] for one in run["result"]]
    assert_valid(again.parent / "out" / "crate", validator)
