"""The loss scale of float16: torch's own rule as oracle, and what a round hands on to the next."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from facility.training.loss_scale import BEGIN, LEAST, STEADY, LossScale
from tests.pico import save_pico
from tests.training.federation import write_dataset
from tests.training.layouts import arguments, rounds_in


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
