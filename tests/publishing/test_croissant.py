"""Croissant cards are read by Croissant's own library, whatever names, licences and languages are in them.

`mlcroissant` is installed from the package index into an environment of its own, for it brings much along.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import venv
from pathlib import Path

import pytest

from coordinator.config.publishing import PublicSettings
from coordinator.publishing.croissant import card
from facility.rounds.dataset_counts import counts_of
from tests.publishing.made import ODD
from tests.training.federation import write_dataset

PACKAGE = "mlcroissant==1.1.1"
COUNTS = {"blocks": 10, "documents": 20, "tokens": 160, "sha256": "a" * 64}
CARDS = [
    ("run", ODD[0], [ODD[0], "it"], "causal-lm"),
    ("facility 2", "", [], "image-classification"),
    ("a.b", ODD[11], [ODD[2]], "preference"),
]


def test_a_file_has_the_size_that_its_card_tells(tmp_path: Path):
    place = tmp_path / "data"
    write_dataset(place, train=1234, block_tokens=16)
    files = card("a", dataclasses.asdict(counts_of(place)), PublicSettings())["distribution"]
    assert {one["@id"]: one["contentSize"] for one in files} == {
        f"{split}.npy": f"{(place / f'{split}.npy').stat().st_size} B" for split in ("train", "validation")
    }


def test_the_card_of_images_tells_no_size_and_no_tokens():
    told = card("a", {"task": "image-classification", "block_tokens": 1, "splits": {"train": COUNTS}}, PublicSettings())
    assert "contentSize" not in json.dumps(told) and "token" not in told["distribution"][0]["description"]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_card_is_valid_by_croissants_own_library(tmp_path: Path):
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    pip = [programs / "python", "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PACKAGE]
    subprocess.run(pip, check=True, cwd=tmp_path)
    for name, license, languages, task in CARDS:
        public = PublicSettings(named=True, dataset_card=True, license=license, languages=languages)
        told = {"task": task, "block_tokens": 16, "splits": {"train": COUNTS, "validation": COUNTS}}
        (tmp_path / "card.json").write_text(json.dumps(card(name, told, public)))
        done = subprocess.run(
            [programs / "mlcroissant", "validate", "--jsonld", tmp_path / "card.json"], capture_output=True, text=True
        )
        assert done.returncode == 0 and "Done." in done.stderr, done.stderr[-3000:]
