"""A training job asks no hub, wherever it runs: libraries it imports would fetch code from there."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

import facility.training.train_round
from facility.train import main


def test_a_round_is_offline_whatever_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen: list[str] = []

    def note(arguments: argparse.Namespace) -> int:
        seen.append(os.environ["HF_HUB_OFFLINE"])
        return 0

    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(facility.training.train_round, "train_round", note)
    place = str(tmp_path)
    assert main(["--model", place, "--dataset", place, "--settings", place, "--round", "0", "--out", place]) == 0
    assert seen == ["1"]
