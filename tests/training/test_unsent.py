"""Law: training continues from the received model plus the residual: on one process, over shards and in pipelines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from facility.exchange.checkpoints.checkpoint import open_checkpoint, save_tensors
from facility.exchange.messages.report import read_report
from tests.pico import save_pico
from tests.training.federation import largest_difference, write_dataset
from tests.training.layouts import arguments, rounds_in
from tests.training.test_layouts import TWO


def unsent(directory: Path, model: Path, *, shape: tuple[int, ...] | None = None) -> dict[str, torch.Tensor]:
    """Of every second tensor something, and of the norms nothing."""
    torch.manual_seed(0)
    chosen = {name: entry.shape for name, entry in open_checkpoint(model).tensors.items() if len(entry.shape) > 1}
    rest = {name: 0.01 * torch.randn(shape or whole) for name, whole in list(chosen.items())[::2]}
    directory.mkdir(parents=True)
    save_tensors(directory, rest.items())
    return rest


@pytest.mark.slow
def test_a_round_from_received_and_unsent_is_one_from_their_sum(tmp_path: Path):
    dataset = write_dataset(tmp_path / "data")
    received = save_pico(tmp_path / "received", tie_word_embeddings=True)
    rest = unsent(tmp_path / "rest", received)
    held = open_checkpoint(received)
    ahead = save_pico(tmp_path / "ahead", tie_word_embeddings=True)
    (ahead / "model.safetensors").unlink()
    save_tensors(ahead, ((name, held.read(name) + rest.get(name, 0)) for name in held.tensors))
    more = ["--unsent", str(tmp_path / "rest")]
    rounds_in(
        [
            ("sum", arguments(tmp_path / "sum", ahead, dataset)),
            ("received", arguments(tmp_path / "plain", received, dataset)),
            ("one", arguments(tmp_path / "one", received, dataset) + more),
        ]
    )
    layouts = {name: TWO[name] for name in ("fsdp", "1f1b", "interleaved")}
    rounds_in(
        [
            (name, arguments(tmp_path / name, received, dataset, **training) + more)
            for name, training in layouts.items()
        ],
        ranks=2,
    )
    assert largest_difference(tmp_path / "sum" / "out", tmp_path / "plain" / "out") > 1e-3
    for name in ("one", *layouts):
        assert largest_difference(tmp_path / "sum" / "out", tmp_path / name / "out") < 1e-5, name
        told, plain = read_report(tmp_path / name / "out"), read_report(tmp_path / "plain" / "out")
        assert told.loss_received == pytest.approx(plain.loss_received, abs=1e-5)  # of the model that all received


def test_what_does_not_fit_the_model_is_an_error(tmp_path: Path):
    dataset, received = write_dataset(tmp_path / "data"), save_pico(tmp_path / "received")
    unsent(tmp_path / "rest", received, shape=(3, 5))
    case = arguments(tmp_path / "one", received, dataset) + ["--unsent", str(tmp_path / "rest")]
    said = rounds_in([("one", case)], expect=2)["one"][0]
    assert "has shape [3, 5]" in said and "remove the directory" in said
    assert not (tmp_path / "one" / "out").exists()
