"""What a report claims is its update's weight: claims beyond what the settings allow are refused, or cut."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from coordinator.config.settings import ClaimSettings, CoordinatorSettings
from coordinator.engine.render import coordinator_settings
from coordinator.rounds.weight_limit import cap, longest_sequence, weight_limit_of
from coordinator.steps.aggregate import close_round
from coordinator.steps.arrived import CollectedRound, sort_out
from coordinator.steps.start import start
from facility.exchange.messages.report import read_failure
from tests.aggregation.updates import write_update
from tests.conftest import ROOT
from tests.federations import write_federation
from tests.pico import save_pico

# 10 sequences a round of at most 30 tokens: 300 tokens.
SETTINGS = CoordinatorSettings(
    federation="f",
    rounds=2,
    facilities=["a", "b"],
    sequences={"a": 10, "b": 10},
    claims=ClaimSettings(sequence_tokens=30),
)


@pytest.fixture
def begun(tmp_path: Path) -> tuple[Archive, Path]:
    archive = Archive(tmp_path / "archive")
    return archive, start(archive, save_pico(tmp_path / "model", dtype="bfloat16"), SETTINGS)[0]


@pytest.mark.parametrize(
    ("action", "refused"),
    [
        ("refuse", True),
        pytest.param("cap", False, marks=pytest.mark.slow),
        pytest.param("off", False, marks=pytest.mark.slow),
    ],
)
def test_the_receive_step_refuses_an_excessive_claim_by_name(begun, tmp_path: Path, action: str, refused: bool):
    _, model = begun
    settings = dataclasses.replace(SETTINGS, claims=dataclasses.replace(SETTINGS.claims, action=action))
    (tmp_path / "coordinator.json").write_text(json.dumps(dataclasses.asdict(settings)))
    job = tmp_path / "work" / str(uuid.uuid4())
    job.mkdir(parents=True)
    for name, tokens, bad in (("a", 300, False), ("b", 301, refused)):
        transfer = job.with_name(str(uuid.uuid4())) / str(uuid.uuid4())
        update = write_update(transfer / "update", model, name, tokens=tokens)
        command = [
            "coordinator.steps.receive",
            "--federation",
            tmp_path / "coordinator.json",
            "--model",
            model,
            "--round",
            0,
            "--facility",
            name,
            "--update",
            update,
            "--out",
            tmp_path / f"{name}-received",
        ]
        subprocess.run(
            [sys.executable, "-m", *map(str, command)], check=True, cwd=job, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        failure = read_failure(tmp_path / f"{name}-received")
        assert (failure is not None) == bad
        assert update.exists() != bad, "a copy of no use takes no room"
        if failure:
            assert (
                failure.kind == "refused" and "claims 301 tokens in round 0, its settings allow 300" in failure.reason
            )
            assert "10 sequences, of 30 tokens at most" in failure.reason


def test_a_capped_claim_counts_what_is_allowed_and_round_json_says_so(begun, tmp_path: Path):
    archive, model = begun
    settings = dataclasses.replace(SETTINGS, claims=dataclasses.replace(SETTINGS.claims, action="cap"))
    updates = [
        write_update(tmp_path / "a", model, "a", tokens=100),
        write_update(tmp_path / "b", model, "b", tokens=9000),
    ]
    close_round(CollectedRound(archive=archive, settings=settings, model=model, number=0, arrived=sort_out(updates)))
    a, b = archive.read_round(0).facilities
    assert (a.weight, b.weight) == (0.25, 0.75)  # 100 and 300
    assert a.reason == "" and b.status == "ok"
    assert "claims 9,000 tokens" in b.reason and b.reason.endswith("300 count")


def test_the_bounds_come_from_the_settings_and_the_model(tmp_path: Path):
    changes = {"training": {"steps": 4, "batch_sequences": 6, "threads": 1}, "claims": {"action": "cap"}}
    path = write_federation(tmp_path, ["a"], **changes)  # type: ignore[arg-type]
    settings = coordinator_settings(read_federation(path))
    assert settings["sequences"] == {"a": 24} and settings["claims"] == {"action": "cap", "sequence_tokens": 0}
    model = tmp_path / "model"
    positions = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert longest_sequence(model) == positions
    found = weight_limit_of(dataclasses.replace(SETTINGS, claims=ClaimSettings()), "a", model)
    assert found is not None and (found.samples, found.tokens) == (10, 10 * positions)
    assert weight_limit_of(SETTINGS, "unknown", model) is None


@pytest.mark.parametrize(("samples", "tokens", "counts"), [(5, 301, 5), (11, 300, 10), (11, 900, 10), (10, 300, None)])
def test_what_is_cut_down_counts_no_more_than_it_claims(samples: int, tokens: int, counts: int | None):
    """Too many tokens, and the weights are samples, of which it claims fewer than it may."""
    settings = dataclasses.replace(
        SETTINGS,
        claims=dataclasses.replace(SETTINGS.claims, action="cap"),
        aggregation=dataclasses.replace(SETTINGS.aggregation, weights="samples"),
    )
    claimed = {"a": SimpleNamespace(samples=samples, tokens=tokens, round=0)}
    assert cap(settings, claimed, Path("model")).weights == ({} if counts is None else {"a": counts})


def test_where_nothing_is_known_or_asked_claims_stand_as_they_are(tmp_path: Path):
    """`refuse` cuts nothing, weights that no report states are not claims, and a model may not state a longest text."""
    claimed = {
        "a": SimpleNamespace(samples=11, tokens=900, round=0),
        "c": SimpleNamespace(samples=7, tokens=7, round=0),
    }

    def counted(action: str, weights: str, model: Path, **changes: object) -> dict[str, float]:
        aggregation = dataclasses.replace(SETTINGS.aggregation, weights=weights)
        asked = ClaimSettings(**{"action": action, "sequence_tokens": 30} | changes)  # type: ignore[arg-type]
        settings = dataclasses.replace(SETTINGS, claims=asked, aggregation=aggregation)
        return cap(settings, claimed, model).weights  # type: ignore[arg-type]

    silent = tmp_path / "silent"
    silent.mkdir()
    (silent / "config.json").write_text('{"model_type": "t5"}')
    assert counted("cap", "tokens", silent) == {"a": 300, "c": 7}, "of c no steps are known"
    assert counted("refuse", "tokens", silent) == counted("off", "tokens", silent) == {}
    assert counted("cap", "equal", silent) == {}
    assert counted("cap", "tokens", silent, sequence_tokens=0) == {} and longest_sequence(silent) == 0
    assert longest_sequence(tmp_path) == 0
    off = dataclasses.replace(SETTINGS, claims=ClaimSettings(action="off", sequence_tokens=30))
    assert weight_limit_of(off, "a", silent) is None
