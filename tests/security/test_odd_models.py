"""A published model's files whose values no model has: every command says so in a sentence, with no traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.aggregation.magnitudes import first_magnitudes
from coordinator.aggregation.walk_plan import WEIGHTS, weights_in
from coordinator.planning.for_training import model_of
from coordinator.rounds.weight_limit import longest_sequence
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.tokenizer import tokenizer_digest
from facility.exchange.errors import CheckpointError, ConfigurationError, InputError
from facility.exchange.messages.emulation import read_trace
from facility.preparing.tokenizer import vocabulary_size
from tests.pico import save_pico

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_pico(tmp_path / "model", dtype="float32")


def put(model: Path, key: str, raw: str) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: "@@@"}).replace('"@@@"', raw))


@pytest.mark.parametrize(
    ("key", "raw", "why"),
    [
        ("vocab_size", "1e400", "vocab_size is inf, expected a number"),
        ("num_hidden_layers", "[4, Infinity]", r"num_hidden_layers is \[4, inf\], expected a number"),
        ("hidden_size", DEEP, "nested too deep"),
        ("text_config", '"text"', "text_config is a \\w+, expected an object"),
        ("text_config", "[4]", "text_config is a \\w+, expected an object"),
    ],
    ids=["infinite", "infinite-in-a-list", "deep", "text", "list"],
)
def test_a_configuration_that_no_model_has_is_refused(model: Path, key: str, raw: str, why: str):
    put(model, key, raw)
    with pytest.raises(ConfigurationError, match=f"the initial model .* cannot be read: .*{why}"):
        model_of(model)


@pytest.mark.parametrize("raw", ["1e400", "NaN", "-1", "-1e400", '"text"', "[]", "[4]", DEEP], ids=range(8))
def test_the_longest_sequence_of_such_a_model_is_not_known_and_ends_no_round(model: Path, raw: str):
    """The steps that receive and close a round ask for it; a number below 0 refused every claim."""
    put(model, "max_position_embeddings", raw)
    assert longest_sequence(model) == 0


def test_files_that_are_nested_without_end_are_refused_by_name(model: Path):
    put(model, "extra", DEEP)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        vocabulary_size(model)
    (model / "tokenizer.json").write_text(f'{{"model": {DEEP}}}')
    with pytest.raises(InputError, match=r"tokenizer\.json is not a tokenizer"):
        tokenizer_digest(model)
    with pytest.raises(ConfigurationError, match="cannot be read as JSON: lists or mappings are nested"):
        read_trace(model / "tokenizer.json")
    name = next(one for one in open_checkpoint(model).tensors if one.endswith("q_proj.weight"))
    magnitude = f"base_model.model.{name.removesuffix('.weight')}.lora_magnitude_vector"
    assert first_magnitudes(open_checkpoint(model), magnitude) is not None


def test_weights_of_a_mean_walk_that_are_nested_without_end_are_refused():
    with pytest.raises(CheckpointError, match="are not a number by facility"):
        weights_in({WEIGHTS: DEEP})
