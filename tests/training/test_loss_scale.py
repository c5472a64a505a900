"""The loss scale of float16: torch's own rule as oracle, and what a round hands on to the next."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from facility.exchange.messages.report import read_report, skipped_of
from facility.training.loss_scale import BEGIN, LEAST, STEADY, LossScale
from tests.distributed import run_distributed
from tests.pico import save_pico
from tests.training.federation import write_dataset
from tests.training.layouts import arguments, rounds_in, run_rounds


def after(scale: LossScale, events: str) -> LossScale:
    """The scale after steps that were good (g) or overflowed (o)."""
    for event in events:
        if event == "g":
            scale.step_was_good()
        else:
            scale.overflowed()
    return scale


@pytest.mark.parametrize("seed", range(4))
def test_follows_the_rule_of_torchs_scaler(seed: int):
    draw, ours = random.Random(seed), LossScale(adapts=True, value=2.0**24)
    theirs, tracker = torch.tensor(2.0**24), torch.tensor(0, dtype=torch.int32)
    for _ in range(6):
        for event in "g" * draw.choice([1, STEADY - 1, STEADY, 2 * STEADY + 3]) + "o" * draw.randint(0, 3):
            torch._amp_update_scale_(theirs, tracker, torch.tensor(float(event == "o")), 2.0, 0.5, STEADY)
            after(ours, event)
            assert ours.value == theirs.item() and ours.steady == tracker.item()


def test_rises_again_from_its_least():
    scale = after(LossScale(adapts=True), "o" * 40)
    assert scale.value == LEAST and not scale.overflowed()
    assert after(scale, "g" * STEADY).value == 2 * LEAST


def test_stays_at_one_in_other_dtypes():
    assert after(LossScale(adapts=False, value=2.0**9), "g" * (2 * STEADY)).value == 1.0


def steep_model(directory: Path) -> Path:
    """A pico Llama whose gradients overflow float16 under the first loss scales."""
    from safetensors.torch import load_file, save_file

    model = save_pico(directory)
    file = model / "model.safetensors"
    save_file({n: t * 100 if "norm" in n else t for n, t in load_file(file).items()}, file, {"format": "pt"})
    return model


def test_a_round_begins_with_the_scale_that_the_one_before_ended_with(tmp_path: Path):
    """Each round began at 32768: where that overflows, so did all its first steps, and a short round had no other."""
    dataset, model = write_dataset(tmp_path / "data"), steep_model(tmp_path / "model")
    chosen: dict[str, Any] = {"steps": 4, "compute_dtype": "float16", "learning_rate": 1e-5}

    def scale_after(round: int, expect: int | None) -> tuple[float, str]:
        said = rounds_in([("one", arguments(tmp_path / "x", model, dataset, round, **chosen))], expect=expect)
        kept = json.loads((tmp_path / "x" / "state" / f"round-{round}" / "state.json").read_text())
        return kept["loss_scale"], said["one"][0]

    first, said = scale_after(0, 2)
    assert first == BEGIN / 2**4
    assert "lowered the loss scale to 2048, from which the next round goes on" in said and "training.steps" in said
    second, _ = scale_after(1, None)
    assert second < first


def overflowing(rank: int, world: int, of: list[int], cases: list[tuple[str, list[str]]]) -> list[tuple[str, int, str]]:
    """`run_rounds`, where on the ranks `of` no step's gradient is finite."""
    from facility.training.engine import Engine

    measure = Engine._measure
    if rank in of:
        Engine._measure = lambda self, loss: (measure(self, loss)[0], math.inf)  # type: ignore[method-assign]
    try:
        return run_rounds(rank, world, cases)
    finally:
        Engine._measure = measure  # type: ignore[method-assign]


@pytest.mark.parametrize("of", [*(pytest.param(one, marks=pytest.mark.slow) for one in ([0], [1])), [0, 1]])
def test_a_replica_that_skips_all_its_steps_ends_the_round_as_the_others_do(tmp_path: Path, of: list[int]):
    """It refused the round by itself, while the others met a closed connection."""
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    chosen: dict[str, Any] = {"steps": 4, "compute_dtype": "float16", "layout": {"sharding": "NO_SHARD"}}
    chosen["sync"] = {"policy": "local", "heartbeat_seconds": 0.5}
    case = arguments(tmp_path / "x", model, dataset, **chosen)
    ended = run_distributed(overflowing, 2, of, [("one", case)])
    kept = json.loads((tmp_path / "x" / "state" / "round-0" / "state.json").read_text())
    assert kept["loss_scale"] == BEGIN / 2**4
    if of == [0, 1]:
        (first,), (second,) = ended
        assert first[1] == second[1] == 2
        assert "every one of the round's 4 steps was skipped" in first[2]
        assert first[2].splitlines()[-1] == second[2].splitlines()[-1]
        assert not (tmp_path / "x" / "out").exists()
        return
    assert [code for ((_, code, _),) in ended] == [0, 0], ended
    report = read_report(tmp_path / "x" / "out")
    assert report.loss_returned < report.loss_received and report.steps == 4
    assert skipped_of(report) == 2, "of the four of one replica and none of the other"
    assert 4 < report.training_loss < 5
    (tmp_path / "x" / "out").rename(tmp_path / "x" / "out-0")
    rounds_in([("next", arguments(tmp_path / "x", model, dataset, 1, **chosen))], ranks=2)
