"""What is published is valid, complete and silent about those who want no name; the model can be made again from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from coordinator.archive.rounds import Archive
from coordinator.config.publishing import Creator
from coordinator.publishing.names import renamed
from coordinator.publishing.publish import publish
from facility.exchange.errors import ConfigurationError, InputError
from tests.comparison.made import add_comparison
from tests.publishing.made import MOST_BYTES, made_federation


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    return made_federation(tmp_path)


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
