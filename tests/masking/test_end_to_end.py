"""Federations of three with secure aggregation under StreamFlow: real trainer processes, real masks."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from coordinator.archive.rounds import Archive
from coordinator.archive.summary import summary
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.preflight.privacy import check_secure_aggregation
from coordinator.publishing.card import privacy as card_privacy
from coordinator.report.make import data_of, make_report
from coordinator.streamflow_plugin.names import SEPARATE_STEPS
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.second_moments import read_factors
from facility.exchange.masking.moments import error_of
from facility.rounds.privacy_ledger import ReleaseLedger
from tests.engine.engines import crossfed, killed_at, streamflow, weights
from tests.federations import write_federation
from tests.masking.federation import ssh_keys

NAMES = ["alpha", "b_2", "gamma"]


def make(root: Path, *, masked: bool = True, **changes: object) -> Path:
    """federation.yml of three local facilities, rendered."""
    signers = ssh_keys(root / "keys", NAMES)
    aggregation = {"rule": changes.pop("rule", "mean"), "clip_ratio": 0}
    privacy = {"secure_aggregation": True, "peer_signers": str(signers), "minimum_sum": 2}
    more = {"privacy": privacy | changes.pop("privacy", {})} if masked else {}  # type: ignore[operator]
    if masked:
        aggregation["allowed_signers"] = str(signers)
    training = {"export_dtype": "float32"} | changes.pop("training", {})  # type: ignore[call-overload, operator]
    path = write_federation(root, NAMES, training=training, aggregation=aggregation, **more, **changes)  # type: ignore[arg-type]
    text = path.read_text()
    for name in NAMES:
        text = text.replace(f"- name: {name}\n", f"- name: {name}\n  training: {{signing_key: {root}/keys/{name}}}\n")
    path.write_text(text)
    write_rendered(read_federation(path))
    return path


def archive_of(path: Path) -> Archive:
    return Archive(read_federation(path).archive_path)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # three facilities, some forty processes a round
SECONDS = 600.0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("training", "rule"), [({}, "mean"), ({"lora": {"rank": 2}}, "nesterov")], ids=["full-mean", "lora-nesterov"]
)
def test_masked_rounds_learn_what_plain_rounds_learn(tmp_path: Path, training: dict[str, object], rule: str):
    path = make(tmp_path / "masked", training=training, rule=rule)
    result = streamflow(path, tmp_path / "masked" / "engine", timeout=SECONDS)
    assert result.returncode == 0, result.stdout[-6000:]
    plain = make(tmp_path / "plain", masked=False, training=training, rule=rule)
    assert streamflow(plain, tmp_path / "plain" / "engine", timeout=SECONDS).returncode == 0
    rows = summary(archive_of(path))["rounds"]
    assert [row["status"] for entry in rows for row in entry["facilities"]] == ["ok"] * 6
    told = json.loads((archive_of(path).path / "round-0001" / "round.json").read_text())["aggregation"]["details"]
    assert told["masking"]["survivors"] == told["masking"]["answered"] == NAMES
    one, two = (summary(archive_of(p))["rounds"][-1]["global_perplexity"] for p in (path, plain))
    assert one == pytest.approx(two, rel=0.005)
    for update in (tmp_path / "masked" / "work").rglob("update/model.safetensors"):
        assert {entry.dtype for entry in open_checkpoint(update.parent).tensors.values()} == {"U16"}


@pytest.mark.parametrize(
    "moments",
    [("b_2 drawing keys", "alpha training", "gamma receiving"), ("b_2 unmasking", "averaging")],
    ids=["before-the-request", "after-it"],
)
def test_killed_at_each_step_the_same_command_completes_the_same_rounds(tmp_path: Path, moments: tuple[str, ...]):
    """With shared second moments: the model that comes of it brings the mean of what lies at the facilities."""
    path = make(tmp_path, rounds=1, final_evaluation=False, training={"optimizer_state": "shared"})
    for moment in moments:
        killed_at(moment, path, tmp_path / "engine")
    process = crossfed("run", "--quiet", "-f", path, folder=tmp_path / "engine")
    text, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, text
    assert len(weights(path)) == 1 and not (archive_of(path).path / "unmasking").exists()
    rows = summary(archive_of(path))["rounds"][0]["facilities"]
    assert [row["status"] for row in rows] == ["ok"] * 3
    shapes = {name: one.shape for name, one in open_checkpoint(archive_of(path).model_for(1)).tensors.items()}
    shared = read_factors(archive_of(path).model_for(1), shapes)[0]
    own = [read_factors(kept_by(tmp_path, n) / "pico" / n / "finished/update-0/update", shapes)[0] for n in NAMES]
    assert shared.keys() == own[0].keys() == shapes.keys()
    for name, one in shared.items():
        mean = np.mean([each[name].rows for each in own], axis=0, dtype=np.float64)
        assert one.rows.any() and np.allclose(one.rows, mean, rtol=2e-7, atol=error_of(1.0, 3)), name
    sent = list((tmp_path / "work").rglob("second_moments/model.safetensors"))
    masked = [path for path in sent if {e.dtype for e in open_checkpoint(path.parent).tensors.values()} == {"U64"}]
    assert len(masked) >= 3, "and nothing of a single facility's travels unmasked"
    digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in sent if path not in masked}
    (mean_file,) = (archive_of(path).model_for(1) / "second_moments").iterdir()
    assert digests <= {hashlib.sha256(mean_file.read_bytes()).hexdigest()}


@pytest.mark.nightly
def test_noised_at_the_facility_and_masked_on_the_way(tmp_path: Path):
    """Killed once while updates come in: gamma's noised update is masked anew, and nothing is spent for that."""
    budget = {"epsilon": 8.0, "delta": 1e-3, "unit": "block"}
    path = make(tmp_path, rounds=1, training={"lora": {"rank": 2}}, privacy={"differential": budget, "minimum_sum": 3})
    (told,) = check_secure_aggregation(read_federation(path))
    assert told.verdict == "ok" and "noised at their facility before they are masked" in told.found
    killed_at("gamma receiving", path, tmp_path / "engine")
    result = streamflow(path, tmp_path / "engine", timeout=SECONDS)
    assert result.returncode == 0, result.stdout[-6000:]
    (entry,) = summary(archive_of(path))["rounds"]
    assert [row["status"] for row in entry["facilities"]] == ["ok"] * 3
    for row in entry["facilities"]:
        ledger = ReleaseLedger(state=tmp_path / "sites" / row["facility"] / ".crossfed" / "pico" / row["facility"])
        assert ledger.count("training") == row["privacy"]["steps"] >= 4
        assert row["facility"] != "gamma" or row["privacy"]["steps"] == 4, "one line a step, not one a mask"
        assert 0.9 * 8 < row["privacy"]["spent"] <= 8 and row["tokens"] == 4 * 4 * 16
    for update in (tmp_path / "work").rglob("update/*.safetensors"):
        assert {one.dtype for one in open_checkpoint(update.parent).tensors.values()} == {"U16"}
    report = data_of(read_federation(path))
    assert report["masking"]["smallest_sum"] == 3 and set(report["privacy"]["facilities"]) == set(NAMES)
    card = card_privacy(report)
    assert "sums of 3 updates or more and no single one" in card and "differentially private" in card
    assert "secure aggregation in 1 of 1 round (" in result.stdout and "privacy of alpha: epsilon" in result.stdout


@pytest.mark.parametrize(
    "module",
    ["facility.train", *(pytest.param(f"facility.{name}", marks=pytest.mark.nightly) for name in ("keys", "unmask"))],
)
def test_whichever_process_of_a_facility_is_killed_the_round_is_of_the_others(
    tmp_path: Path, module: str, monkeypatch: pytest.MonkeyPatch
):
    """SIGKILL, at once and each time: before it has keys, while it trains, and before it answers."""
    monkeypatch.setenv(SEPARATE_STEPS, "1")  # a fork that makes keys would be over before it is seen
    path = make(tmp_path, rounds=1)
    with killing(module, str(tmp_path / "work"), "b_2"):
        result = streamflow(path, tmp_path / "engine", timeout=SECONDS)
    assert result.returncode == 0, result.stdout[-4000:]
    rows = {row["facility"]: row for row in summary(archive_of(path))["rounds"][0]["facilities"]}
    delivered = "ok" if module == "facility.unmask" else "failed"
    assert {name: row["status"] for name, row in rows.items()} == {"alpha": "ok", "b_2": delivered, "gamma": "ok"}
    told = json.loads((archive_of(path).path / "round-0000" / "round.json").read_text())["aggregation"]["details"]
    assert ("b_2" in told["masking"]["answered"]) == (module == "facility.train")


@contextmanager
def killing(module: str, work: str, facility: str) -> Iterator[None]:
    """Kill every process that runs a module of one facility, as soon as it is seen."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            for place in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    words = (place / "cmdline").read_bytes().decode(errors="replace").split("\0")
                    here = os.readlink(place / "cwd").startswith(f"{work}/{facility}/")
                    if module in words and here:
                        os.kill(int(place.name), signal.SIGKILL)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_facility_that_fails_is_left_out_of_the_sum(tmp_path: Path):
    path = make(tmp_path, rounds=1)
    shutil.rmtree(tmp_path / "sites" / "b_2" / "dataset")
    result = streamflow(path, tmp_path / "engine", timeout=SECONDS)
    assert result.returncode == 0, result.stdout[-4000:]
    rows = {row["facility"]: row for row in summary(archive_of(path))["rounds"][0]["facilities"]}
    assert {name: row["status"] for name, row in rows.items()} == {"alpha": "ok", "b_2": "failed", "gamma": "ok"}


def test_the_matrix_has_every_facilitys_own_models_and_nobody_else_gets_them(tmp_path: Path):
    """Base and global on everybody's data; a facility's own last update, and what it trained alone, on its own."""
    path = make(tmp_path, rounds=1, evaluation={"matrix": True, "alone": True})
    result = streamflow(path, tmp_path / "engine", timeout=SECONDS)
    assert result.returncode == 0, result.stdout[-6000:]
    data = data_of(read_federation(path))
    matrix, rows = data["matrix"], {one["facility"]: one for one in data["rounds"][0]["facilities"]}
    assert matrix["complete"] and not matrix["gaps"], matrix["gaps"]
    found = {(one["facility"], one["model"]): one["perplexity"] for one in matrix["cells"]}
    both = {(name, model) for name in NAMES for model in ("initial", "global")}
    assert set(found) == both | {(name, f"{name}{end}") for name in NAMES for end in ("'s update", " alone")}
    for name in NAMES:
        assert found[name, f"{name}'s update"] == pytest.approx(rows[name]["perplexity_returned"], rel=1e-5)
        assert matrix["alone"][name]["tokens"] == rows[name]["tokens"]
    assert len([line for line in matrix["verdicts"] if "its own last update" in line]) == len(NAMES)
    assert "in the rows of their own data alone" in make_report(path).read_text()
    own = {digest for name in NAMES for digest in weights_below(kept_by(tmp_path, name))}
    initial = set(weights_below(tmp_path / "model"))
    assert len(own - initial) >= 2 * len(NAMES), "every update, and every model trained alone, is another"
    elsewhere = weights_below(tmp_path, but=[kept_by(tmp_path, name) for name in NAMES])
    assert elsewhere and not set(elsewhere) & (own - initial), "no update's tensor left its facility"


def kept_by(root: Path, name: str) -> Path:
    """What a facility keeps to itself."""
    return root / "sites" / name / ".crossfed"


def weights_below(root: Path, but: Sequence[Path] = ()) -> dict[str, Path]:
    """Files of weights by the digest of what their tensors hold, whatever else is in the file."""
    found = {}
    for path in root.rglob("*.safetensors"):
        if not any(path.is_relative_to(one) for one in but):
            tensors = load_file(path)
            whole = b"".join(tensors[name].view(torch.uint8).numpy().tobytes() for name in sorted(tensors))
            found[hashlib.sha256(whole).hexdigest()] = path
    return found
