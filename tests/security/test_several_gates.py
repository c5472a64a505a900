"""Gates of several coordinators in one home: nothing by which one reaches the jobs and files of another."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from facility.exchange.errors import ConfigurationError
from facility.gating.policy import read_policy
from facility.gating.several import check_others


def policy(place: Path, name: str, letter: str, **changes: object) -> dict[str, object]:
    """Of the coordinator `name`, with a dataset, signers and a template of its own."""
    return {
        "facility": "alpha",
        "federations": [name],
        "keys": [f"SHA256:{letter * 43}"],
        "coordinators": str(place / f"{name}-signers"),
        "workdir": str(place / f"{name}-work"),
        "datasets": [str(place / f"{name}-data")],
        "scheduler": "slurm",
        "template": str(place / f"{name}.sh"),
    } | changes


def verdict(
    home: Path, first: dict[str, object], second: dict[str, object], *, of: str = "ibis", later: bool = False
) -> str:
    """Why the second one's gate is closed; '' where it is open. `later`: as the site's check of a policy says."""
    files = {"heron": home / "policy.yml", "ibis": home / "gates/ibis/policy.yml"}
    for file, values in zip(files.values(), (first, second), strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    try:
        check_others(files[of], read_policy(files[of]), home, later=later)
    except ConfigurationError as error:
        return str(error)
    return ""


COMMON = {
    "a federation": ({}, {"federations": ["ibis", "heron"]}, "federations heron would come in by two gates"),
    "a key": ({}, {"keys": [f"SHA256:{'a' * 43}"]}, "keys SHA256:a.* would come in by two gates"),
    "a workdir": ({}, {"workdir": "PLACE/heron-work/below"}, "the workdir of the other"),
    "a workdir around another": ({"workdir": "PLACE/ibis-work/below"}, {}, "the workdir of the other"),
    "signers": ({"coordinators": "PLACE/ibis-work/signers"}, {}, "signers .coordinators of one gate. lies in"),
    "a dataset": ({"datasets": ["PLACE/ibis-work/data"]}, {}, "data .datasets of one gate. lies in"),
    "the later one's dataset": ({}, {"datasets": ["PLACE/heron-work/data"]}, "data .datasets of one gate. lies in"),
    "a template": ({"template": "PLACE/ibis-work/job.sh"}, {}, "job.sh .template of one gate. lies in"),
    "tasks": ({"task_directories": ["PLACE/ibis-work/t"]}, {}, "t .task_directories of one gate. lies in"),
    "a policy": ({"workdir": "PLACE/home/gates"}, {}, "policy.yml .policy of one gate. lies in"),
    "a log": ({}, {"workdir": "PLACE/home/gate/below"}, "lies in .*home/gate, where the other keeps its log"),
    "a later one's log": ({"workdir": "PLACE/home/gates/ibis/gate/w"}, {}, "lies in .*ibis/gate, where the other"),
}


@pytest.mark.parametrize("what", COMMON)
def test_a_gate_that_has_something_in_common_with_an_earlier_one_is_closed(what: str, tmp_path: Path):
    first, second, reason = COMMON[what]
    place = str(tmp_path)
    made = [
        json.loads(json.dumps(policy(tmp_path, name, letter) | changes).replace("PLACE", place))
        for name, letter, changes in (("heron", "a", first), ("ibis", "b", second))
    ]
    home = tmp_path / "home"
    assert re.search(reason, found := verdict(home, *made)) and found.endswith(f"{home}/policy.yml as well")
    assert verdict(home, *made, of="heron") == "", "the earlier one stays open"
    found = verdict(home, *made, of="heron", later=True)
    assert re.search(reason, found) and found.endswith("gates/ibis/policy.yml as well, whose gate this policy closes")
    assert verdict(home, *made, later=True) == verdict(home, *made), "a later one's check is of the earlier ones"


def test_gates_that_have_nothing_in_common_are_open(tmp_path: Path):
    data = [str(tmp_path / "data")]
    one, other = (policy(tmp_path, name, letter, datasets=data) for name, letter in (("heron", "a"), ("ibis", "b")))
    for of in ("heron", "ibis"):
        assert verdict(tmp_path / "home", one, other, of=of, later=True) == "", "one dataset may serve both"
    apart = policy(tmp_path, "ibis", "b", dataset_epsilon=8.0)
    assert verdict(tmp_path / "home", one, apart, later=True) == "", "each dataset has an account of its own"


def test_a_new_gate_that_comes_first_by_its_name_is_checked_against_those_there(tmp_path: Path):
    """`egret` is made after `ibis`: by its name it would close that gate, so its own check, which setup.sh runs before
    it lets the key in, refuses it."""
    home = tmp_path / "home"
    for name, letter in (("egret", "a"), ("ibis", "b")):
        (home / "gates" / name).mkdir(parents=True)
        (tmp_path / f"{name}-signers").touch()
        values = policy(tmp_path, name, letter, federations=["bittern"])
        (home / "gates" / name / "policy.yml").write_text(json.dumps(values))
    answer = subprocess.run(
        [sys.executable, "-m", "facility.gate", "--policy", home / "gates/egret/policy.yml", "--check"],
        env=os.environ | {"CROSSFED_HOME": str(home)},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 2 and answer.stdout == ""
    assert "federations bittern would come in by two gates" in answer.stderr
    assert f"{home}/gates/ibis/policy.yml as well, whose gate this policy closes" in answer.stderr
