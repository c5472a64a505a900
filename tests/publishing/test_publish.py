"""What is published is valid, complete and silent about those who want no name; the model can be made again from it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from coordinator.config.publishing import Creator
from coordinator.engine.render import write
from coordinator.publishing.names import renamed
from coordinator.publishing.publish import publish
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.messages.manifest import Manifest, write_manifest
from tests.comparison.made import add_comparison
from tests.conftest import ROOT
from tests.engine.engines import streamflow
from tests.federations import write_federation
from tests.pico import save_pico
from tests.report.made import made_archive

VALIDATOR = os.environ.get("CROSSFED_ROC_VALIDATOR") or shutil.which("rocrate-validator")
PEOPLE = [{"name": "Josiah Carberry", "orcid": "0000-0002-1825-0097", "affiliation": "Brown University"}]
MOST_BYTES = 5_000_000


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    """A made-up federation of three facilities, of which one agrees to be named and publishes counts of its data."""
    archive = made_archive(tmp_path / "archive", facilities=3, rounds=3)
    counts = {"blocks": 10, "documents": 20, "tokens": 160, "sha256": "a" * 64}
    for number in range(3):
        path = archive.round_directory(number) / "round.json"
        record = json.loads(path.read_text())
        record["facilities"][0]["dataset"] = {"task": "causal-lm", "block_tokens": 16, "splits": {"train": counts}}
        path.write_text(json.dumps(record))
    for place in (archive.path / "initial" / "model", archive.round_directory(2) / "model"):
        save_pico(place)
        write_manifest(place, Manifest(kind="model", federation="made", round=0))
    path = tmp_path / "workflow" / "federation.yml"
    path.parent.mkdir()
    public = "public: {named: true, dataset_card: true, languages: [it], license: cc-by-4.0}"
    path.write_text(
        "name: made\nmodel: ../model\nrounds: 3\narchive: ../archive\nworkdir: ../work\n"
        f"title: A made model\nlicense: apache-2.0\ncreators: {json.dumps(PEOPLE)}\nfunding: [Grant 1]\n"
        f"facilities:\n  - {{name: facility-00, dataset: /data, {public}}}\n"
        "  - {name: facility-01, dataset: /data}\n  - {name: facility-02, dataset: /data}\n"
    )
    return path


def test_a_publication_holds_the_model_its_card_and_a_crate(federation: Path, tmp_path: Path):
    out = publish(federation, tmp_path / "out")
    card = ModelCard.load(out / "model" / "README.md")
    assert card.data.license == "apache-2.0" and card.data.language == ["it"]
    assert (out / "model" / "model.safetensors").is_file()
    text = "\n".join(
        path.read_text(errors="replace") for path in out.rglob("*") if path.is_file() and path.suffix != ".safetensors"
    )
    assert "facility-00" in text and "facility 2" in text and "0000-0002-1825-0097" in text
    assert "facility-01" not in text and "facility-02" not in text
    assert "no differential privacy was applied" in card.text
    crate = out / "crate"
    graph = json.loads((crate / "ro-crate-metadata.json").read_text())["@graph"]
    actions = [one for one in graph if one["@type"] == "CreateAction"]
    assert len(actions) == 1 + 3 * 3
    assert sum("#run" == one["@id"] for one in actions) == 1
    assert sum(one["actionStatus"]["@id"].endswith("FailedActionStatus") for one in actions) == 2
    assert sum(path.stat().st_size for path in crate.rglob("*") if path.is_file()) < MOST_BYTES
    assert not list(crate.rglob("*.safetensors"))
    cards = list((crate / "croissant").glob("*.json"))
    assert [one.name for one in cards] == ["facility-00.json"] and "a" * 64 in cards[0].read_text()
    bill = json.loads((crate / "sbom.json").read_text())
    assert bill["bomFormat"] == "CycloneDX" and {"torch", "transformers"} <= {one["name"] for one in bill["components"]}


def test_a_comparison_of_models_names_nobody_who_wants_no_name(federation: Path, tmp_path: Path):
    names = ["facility-00", "facility-01", "facility-02"]
    add_comparison(Archive(tmp_path / "archive"), names, absent="facility-02")
    out = publish(federation, tmp_path / "out")
    card = (out / "model" / "README.md").read_text()
    assert "facility-00 alone" in card and "facility 2's update" in card and "bootstrap" in card
    text = "\n".join(path.read_text(errors="replace") for path in (out / "crate").rglob("*") if path.is_file())
    assert "facility 2's update" in card + text
    assert "facility-01" not in card + text and "facility-02" not in card + text


def test_the_crate_is_a_valid_workflow_run_crate(federation: Path, tmp_path: Path):
    if VALIDATOR is None:
        pytest.skip("roc-validator is not installed; it needs an environment of its own (CROSSFED_ROC_VALIDATOR)")
    out = publish(federation, tmp_path / "out")
    for profile in ("workflow-run-crate", "process-run-crate"):
        command = [VALIDATOR, "--no-interactive", "validate", "--profile-identifier", profile]
        command += ["--requirement-severity", "REQUIRED", str(out / "crate")]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240)
        if "urlopen error" in result.stdout or "NameResolutionError" in result.stdout:
            pytest.skip("roc-validator fetches the profiles' contexts, and there is no network")
        assert result.returncode == 0, result.stdout + result.stderr


def test_what_cannot_be_published_is_refused(federation: Path, tmp_path: Path):
    publish(federation, tmp_path / "out")
    with pytest.raises(InputError, match="exists already"):
        publish(federation, tmp_path / "out")
    shutil.rmtree(tmp_path / "archive")
    with pytest.raises(InputError, match="no round is complete"):
        publish(federation, tmp_path / "other")


@pytest.mark.parametrize("orcid", ["0000-0002-1825-0098", "1825-0097", "0000-0002-1825-009X"])
def test_an_orcid_with_a_wrong_check_digit_is_refused(orcid: str):
    with pytest.raises(ConfigurationError, match="orcid"):
        Creator(name="a", orcid=orcid)


def test_no_name_survives_as_a_part_of_a_longer_one():
    assert renamed("ab a abc", {"a": "1", "abc": "3", "ab": "2"}) == "2 1 3"


@pytest.mark.slow
def test_the_last_model_is_made_again_from_the_crate_alone(tmp_path: Path):
    """A small federation is run and published; its crate's own commands, elsewhere, give the same digest."""
    changes = {"title": "Pico", "license": "apache-2.0", "creators": PEOPLE}
    path = write_federation(tmp_path / "first", ["site-a.1", "b_2"], **changes)
    text = path.read_text()
    for name in ("site-a.1", "b_2"):
        text = text.replace(f"- name: {name}\n", f"- name: {name}\n  public: {{named: true, dataset_card: true}}\n")
    path.write_text(text)
    write(read_federation(path))
    result = streamflow(path, tmp_path / "engine")
    assert result.returncode == 0, result.stdout[-4000:]
    out = publish(path, tmp_path / "out")
    again = tmp_path / "again"
    shutil.copytree(out / "crate", again)
    shutil.copytree(tmp_path / "first" / "model", again / "model")
    for name in ("site-a.1", "b_2"):
        shutil.copytree(tmp_path / "first" / "sites" / name / "dataset", again / "datasets" / name)
    shutil.rmtree(tmp_path / "first")
    commands = re.search(r"```bash\n(.*?)```", (again / "reproduce.md").read_text(), re.S)
    assert commands is not None
    crossfed = tmp_path / "bin" / "crossfed"
    crossfed.parent.mkdir()
    crossfed.write_text(f'#!/bin/sh\nexec {sys.executable} -m coordinator.cli "$@"\n')
    crossfed.chmod(0o755)
    (crossfed.parent / "python").symlink_to(sys.executable)
    environment = os.environ | {
        "PATH": f"{crossfed.parent}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands[1]], cwd=again, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
