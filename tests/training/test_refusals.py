"""Law: a model that the trainer would train wrongly, or cannot build, is refused in one sentence."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from facility.dataset import open_dataset
from facility.exchange.errors import InputError
from facility.exchange.messages.settings import FacilitySettings
from facility.training.data.inputs import check_inputs
from facility.training.data.tasks import check_family
from facility.training.model import Attention, build_base_model
from tests.pico import pico_config, save_pico
from tests.training.federation import write_dataset
from tests.training.layouts import arguments, rounds_in


def test_a_model_that_sees_what_it_is_to_predict_is_refused(tmp_path: Path):
    model, dataset = save_pico(tmp_path / "model", "bert"), write_dataset(tmp_path / "data")
    (said,) = rounds_in([("bert", arguments(tmp_path / "run", model, dataset))], expect=2)["bert"]
    assert "is_decoder false" in said


def test_decoders_and_decoders_of_encoder_decoders_are_not():
    from transformers import BartConfig, XLNetConfig

    for config in (pico_config("llama"), pico_config("gpt2"), pico_config("bert", is_decoder=True), BartConfig()):
        check_family(config, causal=True)
    with pytest.raises(InputError, match="permuted"):
        check_family(XLNetConfig(), causal=True)


@pytest.mark.parametrize("error", [ImportError("needs timm"), ValueError("no sdpa in a part of it")])
def test_a_model_that_cannot_be_built_is_refused_with_what_transformers_says(error: Exception):
    def from_config(*arguments: Any, **options: Any) -> torch.nn.Module:
        raise error

    with pytest.raises(InputError, match=f"cannot build a llama model here with sdpa attention: {error}"):
        build_base_model(
            pico_config("llama"), SimpleNamespace(from_config=from_config), Attention(name="sdpa", reason="")
        )


def test_a_model_of_several_parts_with_too_few_entries_is_refused_before_a_document_fails_on_one(tmp_path: Path):
    """Else a failure would say whether some document holds an entry that the sender left out, which no noise covers."""
    from transformers import Gemma3Config

    dataset = open_dataset(write_dataset(tmp_path / "data"))
    entries = dataset.manifest.vocabulary_size
    settings = FacilitySettings(federation="f", facility="a", rounds=1, seed=0)
    check_inputs(0, tmp_path / "out", settings, dataset, Gemma3Config(text_config={"vocab_size": entries}))
    with pytest.raises(InputError, match=f"vocabulary of {entries}, the model has {entries - 1} entries"):
        check_inputs(0, tmp_path / "out", settings, dataset, Gemma3Config(text_config={"vocab_size": entries - 1}))


def test_a_model_of_several_parts_with_too_few_positions_is_refused(tmp_path: Path):
    from transformers import Gemma3Config

    dataset = open_dataset(write_dataset(tmp_path / "data"))
    tokens = dataset.manifest.block_tokens
    settings = FacilitySettings(federation="f", facility="a", rounds=1, seed=0)

    def check(positions: int) -> None:
        parts = {"vocab_size": dataset.manifest.vocabulary_size, "max_position_embeddings": positions}
        check_inputs(0, tmp_path / "out", settings, dataset, Gemma3Config(text_config=parts))

    check(tokens)
    with pytest.raises(InputError, match=f"blocks of {tokens} tokens, the model takes at most {tokens - 1} positions"):
        check(tokens - 1)
