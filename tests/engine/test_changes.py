"""federation.yml changes while a federation lives: one facility joins, one leaves, and the archive tells it all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from tests.engine.engines import crossfed
from tests.engine.test_quorum import federate, rows_of
from tests.federations import write_dataset


def edited(path: Path, **changes: Any) -> None:
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | changes, sort_keys=False))


def run(path: Path, folder: Path, *options: str) -> tuple[int, str]:
    process = crossfed("run", "--quiet", "-f", path, *options, folder=folder)
    text, _ = process.communicate(timeout=280)
    return process.returncode, text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_joins_and_one_leaves_once_it_is_accepted(tmp_path: Path):
    path = federate(tmp_path, ["a", "b"], count=1, quorum="all")
    edited(path, rounds=1, final_evaluation=False, aggregation={"rule": "mean"})
    engine = tmp_path / "engine"
    code, text = run(path, engine)
    assert code == 0, text
    write_dataset(tmp_path / "sites" / "new" / "dataset", seed=9)
    facilities = yaml.safe_load(path.read_text())["facilities"]
    edited(path, rounds=2, facilities=[facilities[0], {"name": "new", "dataset": "../sites/new/dataset"}])
    before = (path.parent / "coordinator.json").read_text()
    code, text = run(path, engine)
    assert code == 2 and "--accept" in text and "facilities[new]" in text and "facilities[b]" in text, text
    assert text.count("facilities[new]") == 1, "told once"
    assert (path.parent / "coordinator.json").read_text() == before, "nothing was changed"
    assert len(Archive(read_federation(path).archive_path).rounds()) == 1
    code, text = run(path, engine, "--accept")
    assert code == 0 and text.count("changed: facilities[new]") == 1, text
    by_round = {number: {row.facility: row.status for row in rows_of(path) if row.round == number} for number in (0, 1)}
    assert by_round == {0: {"a": "ok", "b": "ok"}, 1: {"a": "ok", "new": "ok"}}
    told = Archive(read_federation(path).archive_path).read_round(1).changes
    assert any("facilities[new]" in one for one in told) and any("facilities[b]" in one for one in told)
    process = crossfed("report", "-f", path, "--format", "json", "--out", tmp_path / "r.json", folder=engine)
    text, _ = process.communicate(timeout=200)
    assert process.returncode == 0, text
    data = json.loads((tmp_path / "r.json").read_text())
    assert set(data["facilities"]) == {"a", "new", "b"} and any("facilities[b]" in one for one in data["remarks"])
    again, text = run(path, engine)
    assert again == 0 and "changed:" not in text, "told once"
