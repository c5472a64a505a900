"""What counts steps goes on at a pause: the loss scale of fp16, when it is doubled, and losses that are not finite."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from facility.exchange.messages.outcome import Outcome
from facility.exchange.messages.settings import TrainingSettings
from facility.training.engine import Engine
from facility.training.loss_scale import LossScale
from facility.training.state import resume, state
from tests.training.federation import write_dataset
from tests.training.layouts import arguments, rounds_in


def engine_after(dtype: str, events: str) -> Any:
    """An engine's counters after steps that were good (g), overflowed (o) or had no finite loss (n)."""
    limits = SimpleNamespace(bad_losses=100)
    engine = SimpleNamespace(
        scale=LossScale(adapts=dtype == "float16"),
        skipped=0,
        bad_in_a_row=0,
        settings=SimpleNamespace(limits=limits),
        together=True,
        layout=None,
        ranks=SimpleNamespace(world=1),
        optimizer=None,
        parts=[],
        assembly=SimpleNamespace(statistics=[]),
    )
    count(engine, events)
    return engine


def count(engine: Any, events: str) -> None:
    for event in events:
        Engine._count(engine, event == "g", 1.0, 1.0 if event != "n" else float("nan"))


def resumed(monkeypatch: pytest.MonkeyPatch, engine: Any, at: state.ReplicaProgress, dtype: str, written: str) -> Any:
    """`engine`, into which `at` was read; the paused attempt wrote that it computes in `written`."""
    pause = state.MidRoundCheckpoint(
        federation="f",
        facility="a",
        seed=0,
        round=0,
        base_sha256="x",
        loss_received=1.0,
        seconds=1.0,
        interruptions=0,
        replicas=[at],
        sync=[],
        compute_dtype=written,
    )
    monkeypatch.setattr(state, "load_checkpoint", lambda *_, **__: None)
    monkeypatch.setattr(resume, "replica_share", lambda *_, **__: 1)
    request: Any = SimpleNamespace(training=TrainingSettings(compute_dtype=dtype), state=Path())
    saved = resume.SavedState(previous=None, reason="", checkpoint=pause)
    resume.restore_state(request, saved, engine, replica=0, replicas=1)
    return engine


@pytest.mark.parametrize("events", ["g" * 499, "o" * 3 + "g" * 499, "gng" + "n" * 7], ids=["doubled", "late", "bad"])
def test_a_pause_changes_no_counter(monkeypatch: pytest.MonkeyPatch, events: str):
    """The loss scale doubles after 500 good steps in a row, whether or not a scheduler's limit came between."""
    monkeypatch.setattr(resume, "agree_on_failure", lambda _: nullcontext())
    quiet, stopped = engine_after("float16", events + "g" * 3), engine_after("float16", events)
    progress = state.ReplicaProgress(
        steps=len(events),
        position=0,
        optimizer_steps=events.count("g"),
        losses=[],
        scale=stopped.scale.value,
        steady=stopped.scale.steady,
        skipped=stopped.skipped,
        samples=0.0,
        bad_in_a_row=stopped.bad_in_a_row,
    )
    again = resumed(monkeypatch, engine_after("float16", ""), progress, "float16", "float16")
    assert again.bad_in_a_row == stopped.bad_in_a_row
    count(again, "g" * 3)
    for name in ("scale", "skipped", "bad_in_a_row"):
        assert getattr(again, name) == getattr(quiet, name), name


@pytest.mark.parametrize(("before", "now", "scale"), [("float32", "float16", 2.0**15), ("float16", "bfloat16", 1.0)])
def test_a_loss_scale_of_another_dtype_is_of_no_use(monkeypatch, before: Any, now: Any, scale: float):
    """An attempt in float32 left the scale 1: in fp16, gradients below 6e-8 were zero from then on."""
    monkeypatch.setattr(resume, "agree_on_failure", lambda _: nullcontext())
    left = 1.0 if before == "float32" else 2.0**13
    progress = state.ReplicaProgress(
        steps=3, position=0, optimizer_steps=3, losses=[], scale=left, skipped=0, samples=0.0
    )
    assert resumed(monkeypatch, engine_after(now, ""), progress, now, before).scale.value == scale


def test_a_pause_and_a_round_say_what_their_counters_and_moments_are_of(tmp_path: Path, pico_llama: Path):
    dataset = write_dataset(tmp_path / "data")
    chosen: dict[str, Any] = {"steps": 3, "beta1": 0.8, "beta2": 0.99}
    stopped = arguments(tmp_path / "x", pico_llama, dataset, **chosen, limits={"stop_after": 2})
    rounds_in([("stopped", stopped)], expect=Outcome.CHECKPOINTED)
    paused = json.loads((tmp_path / "x" / "state" / "paused" / "state.json").read_text())
    assert paused["betas"] == [0.8, 0.99] and paused["compute_dtype"] == "float32"
    assert paused["replicas"][0]["bad_in_a_row"] == 0
    rounds_in([("whole", arguments(tmp_path / "x", pico_llama, dataset, **chosen | {"beta2": 0.95}))])
    whole = json.loads((tmp_path / "x" / "state" / "round-0" / "state.json").read_text())
    assert whole["betas"] == [0.8, 0.95]
