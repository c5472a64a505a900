"""Semi-decentralised rounds over facilities: the scheduler driven by files, and means worked by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coordinator.asynchronous.semidecentral import SemiDecentralised
from facility.exchange.errors import InputError, UpdateRefused
from facility.exchange.messages import report as reports
from facility.exchange.messages.manifest import Manifest, verify_manifest, write_manifest
from facility.exchange.scheduling.groups import GroupRules
from tests.pico import save_pico

RULES = GroupRules(bound=3, window_seconds=60, window_maximum_seconds=600)


def make_update(directory: Path, facility: str, *, tokens: int, seed: int, round: int = 0) -> Path:
    save_pico(directory, seed=seed)
    report = reports.Report(
        federation="f",
        facility=facility,
        round=round,
        samples=1,
        tokens=tokens,
        steps=1,
        loss_received=1.0,
        loss_returned=1.0,
        perplexity_received=1.0,
        perplexity_returned=1.0,
        training_loss=1.0,
    )
    reports.write(directory, report)
    write_manifest(directory, Manifest(kind="update", federation="f", round=round, facility=facility))
    return directory


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(directory) / "model.safetensors")


def test_a_group_is_the_weighted_mean_of_its_members(tmp_path):
    driver = SemiDecentralised.start(tmp_path / "s", ["it", "cs", "de"], RULES)
    updates = {
        n: make_update(tmp_path / n, n, tokens=t, seed=i)
        for i, (n, t) in enumerate(zip(["it", "cs", "de"], [100, 300, 50], strict=True))
    }
    assert driver.ready("it", updates["it"], 0.0) == []
    assert driver.ready("cs", updates["cs"], 10.0) == []
    driver = SemiDecentralised(tmp_path / "s")  # another call of the command
    (reduced,) = driver.tick(60.0)
    assert reduced.group.members == ("cs", "it") and driver.models["it"] == driver.models["cs"] == str(reduced.model)
    it, cs, mean = weights_of(updates["it"]), weights_of(updates["cs"]), weights_of(reduced.model)
    for name in mean:
        torch.testing.assert_close(mean[name], 0.25 * it[name] + 0.75 * cs[name], rtol=1e-6, atol=1e-7)
    assert verify_manifest(reduced.model).extra["members"] == ["cs", "it"]


def test_nobody_waits_for_the_slowest_until_the_bound_asks_and_the_end_is_the_mean_of_all(tmp_path):
    driver = SemiDecentralised.start(tmp_path / "s", ["a", "b", "slow"], RULES, weights="equal")
    updates = {n: make_update(tmp_path / n, n, tokens=1, seed=i) for i, n in enumerate(["a", "b", "slow"])}
    rounds = 0
    for turn in range(9):
        driver.ready("a", updates["a"], 1000.0 * turn)
        if driver.ready("b", updates["b"], 1000.0 * turn + 1) or driver.tick(1000.0 * turn + 700):
            rounds += 1
        else:
            break
    assert rounds == 3, "with P = 3 and N = 3, six updates go without the third; the next waits for it"
    (reduced,) = driver.ready("slow", updates["slow"], 9000.0)
    assert reduced.group.members == ("a", "b", "slow") and reduced.group.connected
    for name in ("a", "b"):
        assert driver.finish(name, 9500.0) == []
    (final,) = driver.finish("slow", 9600.0)
    assert final.group.final
    driver = SemiDecentralised(tmp_path / "s")
    assert driver.final == str(final.model) and driver.groups[-1]["members"] == ["a", "b", "slow"]
    assert driver.rounds == {"a": 4, "b": 4, "slow": 1}
    mean, parts = weights_of(final.model), [weights_of(u) for u in updates.values()]
    for name in mean:
        torch.testing.assert_close(mean[name], sum(p[name] for p in parts) / 3, rtol=1e-6, atol=1e-7)


def test_what_does_not_fit_is_refused(tmp_path):
    driver = SemiDecentralised.start(tmp_path / "s", ["it", "cs"], RULES)
    update = make_update(tmp_path / "it", "it", tokens=1, seed=0)
    with pytest.raises(InputError, match="not a member"):
        driver.ready("fr", update, 0)
    with pytest.raises(UpdateRefused, match="of facility 'it'"):
        driver.ready("cs", update, 0)
    (update / "config.json").write_text("{}")
    with pytest.raises(InputError, match="config.json"):
        driver.ready("it", update, 0)
    with pytest.raises(InputError, match="exists already"):
        SemiDecentralised.start(tmp_path / "s", ["it", "cs"], RULES)
    with pytest.raises(InputError, match="begin with `start"):
        SemiDecentralised(tmp_path / "nowhere")


def test_the_command(tmp_path):
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "coordinator.asynchronous.semidecentral",
            "--json",
            "--state",
            str(tmp_path / "s"),
            *words,
        ]
        return subprocess.run(command, capture_output=True, text=True)

    assert call("start", "--member", "it", "--member", "cs", "--weights", "equal").returncode == 0
    for name, seed in (("it", 0), ("cs", 1)):
        make_update(tmp_path / name, name, tokens=1, seed=seed)
    first = call("ready", "it", "--update", str(tmp_path / "it"))
    assert json.loads(first.stdout)["waiting"] == ["it"]
    second = json.loads(call("ready", "cs", "--update", str(tmp_path / "cs")).stdout)
    assert second["groups"][0]["members"] == ["cs", "it"] and Path(second["groups"][0]["model"]).is_dir()
    wrong = call("ready", "fr", "--update", str(tmp_path / "it"))
    assert wrong.returncode == 2 and "not a member" in wrong.stderr
