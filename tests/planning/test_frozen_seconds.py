"""Seconds of frozen weights and adapters follow the operations that torch counts in peft's own model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from coordinator.memory.figures import model_figures
from coordinator.memory.weights import dimensions_of, weights_of
from coordinator.planning import frozen_seconds
from coordinator.planning.frozen_seconds import operations, with_frozen
from coordinator.problem.problem import Unit
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.validation import parse_dataclass
from tests.pico import save_pico

TOKENS, BLOCKS = 16, 4
TARGETS: dict[str, list[str]] = {"every layer": [], "two": ["q_proj", "v_proj"]}


def settings(**values: Any) -> TrainingSettings:
    found: TrainingSettings = parse_dataclass(TrainingSettings, values)
    return found


def base(root: Path, *, tied: bool = False, width: int = 64) -> Path:
    size = {"hidden_size": width, "intermediate_size": 2 * width}
    return save_pico(root / "base", dtype="bfloat16", tie_word_embeddings=tied, **size)


def units() -> list[Unit]:
    one = Unit(
        kind="block",
        parameter_bytes=1,
        state_bytes=1,
        activation_bytes=1,
        forward_seconds=1.0,
        backward_seconds=2.0,
        forward_overhead_seconds=0.1,
        backward_overhead_seconds=0.2,
        update_seconds=0.5,
    )
    return [replace(one, kind="embedding"), *[one] * BLOCKS, replace(one, kind="head")]


def timed(model: Path, training: TrainingSettings) -> list[Unit]:
    figures = model_figures(model)
    return with_frozen(units(), weights_of(figures, training, chunked=False), dimensions_of(figures), tokens=TOKENS)


def products(model: Any) -> tuple[int, int]:
    """Operations of matrix products of one sequence, without attention's, forward and backward, as torch counts."""
    ids = torch.arange(TOKENS)[None]
    found = []
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=ids).logits.float().logsumexp(-1).sum()
        for act in (lambda: None, loss.backward):
            act()
            counts = counter.get_flop_counts()["Global"]
            found.append(sum(n for operation, n in counts.items() if str(operation) in ("aten.mm", "aten.addmm")))
    return found[0], found[1] - found[0]


@pytest.mark.parametrize("targets", list(TARGETS))
def test_operations_are_those_that_torch_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: str):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(frozen_seconds, "FORWARD_MOVED", 0)
    monkeypatch.setattr(frozen_seconds, "BACKWARD_MOVED", 0)
    place = base(tmp_path)
    for rank in (0, 4):
        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, attn_implementation="eager")
        lora = {"rank": rank} | ({"targets": TARGETS[targets]} if TARGETS[targets] else {})
        held = weights_of(model_figures(place), settings(**({"lora": lora} if rank else {})), chunked=False)
        if rank:
            wanted = TARGETS[targets] or "all-linear"
            model = get_peft_model(model, LoraConfig(r=rank, target_modules=wanted, task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
        ours = operations(held, 0.0, trained=False)
        assert (TOKENS * ours.forward, TOKENS * ours.backward) == products(model)


def test_a_whole_models_seconds_stay_as_measured(tmp_path: Path):
    assert timed(base(tmp_path), settings()) == units()


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_take_longer_forward_and_less_time_backward(tmp_path: Path, tied: bool):
    embedding, *blocks, head = timed(base(tmp_path, tied=tied, width=256), settings(lora={"rank": 4}))
    assert (embedding.forward_seconds, embedding.backward_seconds) == (1.0, 0.0), "nothing below it is trained"
    for block in blocks:
        assert block.forward_seconds > 1.0 and 1.0 < block.backward_seconds < 2.0
        assert block.backward_overhead_seconds / block.backward_seconds == pytest.approx(0.1)
        assert 0 < block.update_seconds < 0.25
    assert (head.forward_seconds, head.backward_seconds) == (1.0, 1.0), "the gradient of its input alone"


def test_frozen_blocks_before_all_that_is_trained_have_no_backward(tmp_path: Path):
    frozen = settings(freeze=["model.embed_tokens.*", "model.layers.0.*", "model.layers.2.*"])
    found = [one.backward_seconds for one in timed(base(tmp_path), frozen)]
    assert found[:3] == [0.0, 0.0, 2.0] and 1.0 < found[3] < 1.1 and found[4:] == [2.0, 2.0]
