"""Federations by groups under the real engine: with facilities that only pretend to train, and with real ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.archive.rounds import Archive
from coordinator.asynchronous.summary import summary
from coordinator.config.federation import read_federation
from coordinator.engine.render import write
from facility.exchange.messages.manifest import verify_manifest
from tests.conftest import ROOT
from tests.engine.engines import crossfed, killed_at, streamflow
from tests.federations import write_dataset, write_federation

STAND_IN = ROOT / "tests" / "steps" / "stand_in_facility.py"


def pretending(root: Path, plans: dict[str, dict[str, Any]], **changes: Any) -> Path:
    """A federation whose facilities give the model back as their update, each in its own time."""
    path = write_federation(root, list(plans), claims={"action": "off"}, **changes)
    described = yaml.safe_load(path.read_text())
    for facility in described["facilities"]:
        plan = root / "sites" / facility["name"] / "plan.yml"
        plan.write_text(json.dumps(plans[facility["name"]]))
        facility["dataset"] = str(plan)
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    train = yaml.safe_load((ROOT / "cwl" / "tools" / "train.cwl").read_text())
    train["baseCommand"] = ["env", f"PYTHONPATH={ROOT}", "python3", str(STAND_IN), "--out", "update"]
    (root / "cwl" / "tools").mkdir(parents=True)
    (root / "cwl" / "tools" / "train.cwl").write_text(yaml.safe_dump(train))
    write(read_federation(path))
    return path


def told(path: Path) -> dict[str, Any]:
    return summary(Archive(read_federation(path).archive_path))


@pytest.mark.slow
def test_chains_go_at_speeds_of_their_own_and_one_that_fails_comes_back(tmp_path: Path):
    plans = {"site-a.1": {"seconds": 0, "fail_rounds": [1]}, "slow": {"seconds": 7}}
    groups = {"bound": 0, "minimum": 1, "window_seconds": 0.1}
    path = pretending(tmp_path, plans, groups=groups, retries=1)
    result = streamflow(path, tmp_path / "engine")
    assert result.returncode == 0, result.stdout[-6000:]
    data = told(path)
    *made, final = data["groups"]
    assert final["final"] and final["members"] == ["site-a.1", "slow"]
    for name in plans:
        assert [group["rounds"][name] for group in made if name in group["members"]] == [1, 2]
    assert (made[0]["members"], made[-1]["members"]) == (["site-a.1"], ["slow"])
    assert [one["reason"] for one in data["facilities"]["site-a.1"]["failures"]] == ["the node burnt down"]
    verify_manifest(Path(data["model"]))
    (out,) = (tmp_path / "engine" / "out").rglob("summary.json")
    assert json.loads(out.read_text())["groups"] == data["groups"]


@pytest.mark.slow  # the quicker law is in test_meeting.py
def test_too_few_facilities_end_the_run_with_the_reason(tmp_path: Path):
    plans = {"a": {"seconds": 0}, "b": {"seconds": 0, "fail_rounds": [0]}}
    path = pretending(tmp_path, plans, groups={"bound": 1}, minimum_facilities=2)
    result = streamflow(path, tmp_path / "engine")
    assert result.returncode == 1
    assert (
        "1 of 2 facilities are left, minimum_facilities is 2: b: round 0, attempt 1: the node burnt down"
        in result.stdout
    )
    assert told(path)["model"] is None


@pytest.mark.slow
def test_real_facilities_of_unlike_speed_killed_half_way_make_one_good_model(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    path = write_federation(tmp_path, ["site-a.1", "b_2", "slow"], groups={"minimum": 1, "window_seconds": 2})
    shutil.rmtree(tmp_path / "sites" / "slow" / "dataset")
    write_dataset(tmp_path / "sites" / "slow" / "dataset", seed=2, blocks=6_000)  # evaluated twice a round
    write(read_federation(path))
    killed_at("group 1 (", path, tmp_path / "engine")
    before = told(path)
    process = crossfed("run", "--quiet", "-f", path, folder=tmp_path / "engine")
    text, _ = process.communicate(timeout=280)
    assert process.returncode == 0, text
    data = told(path)
    assert data["groups"][: len(before["groups"])] == before["groups"]
    *made, final = data["groups"]
    assert final["final"] and len(final["members"]) == 3
    for name in ("site-a.1", "b_2", "slow"):
        counts = [group["rounds"][name] for group in made if name in group["members"]]
        assert counts == [1, 2], "no update counts twice"
    assert any("slow" not in group["members"] for group in made)
    assert max(final["perplexity_returned"].values()) < 110, "better than a guess among 128 words"
    model = AutoModelForCausalLM.from_pretrained(data["model"])
    assert sum(p.numel() for p in model.parameters()) > 10_000
    again = crossfed("run", "--quiet", "-f", path, folder=tmp_path / "engine")
    text, _ = again.communicate(timeout=120)
    assert again.returncode == 0 and "training" not in text, text
