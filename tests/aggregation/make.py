"""Small checkpoints, updates and models for the tests of the coordinator's aggregation."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from coordinator.aggregation import run
from coordinator.aggregation.record import RoundRecord
from coordinator.aggregation.request import Request
from coordinator.aggregation.settings import AggregationSettings
from facility.exchange.checkpoints.checkpoint import open_checkpoint, save_tensors
from facility.exchange.files.durable import write_json
from facility.exchange.messages import report
from facility.exchange.messages.manifest import Manifest, read_manifest, write_manifest

Tensors = dict[str, torch.Tensor]
UNBOUNDED: dict[str, Any] = {"clip_ratio": 0.0, "maximum_share": 1.0}
"""Aggregation settings under which the mean of three updates and more is the textbook's."""


def aggregate(**asked: Any) -> RoundRecord:
    """One aggregation. `asked`: the fields of its `Request`; the settings are the plain mean unless they are given."""
    return run.aggregate(Request(**{"settings": AggregationSettings(rule="mean"), **asked}))


def checkpoint(
    directory: Path, tensors: Tensors, *, shard_bytes: int = 2_000_000_000, config: dict[str, Any] | None = None
) -> Path:
    """A checkpoint directory with a configuration file, without a manifest."""
    directory.mkdir(parents=True)
    save_tensors(directory, tensors.items(), shard_bytes=shard_bytes)
    write_json(directory / "config.json", {"model_type": "llama"} if config is None else config)
    return directory


def model(directory: Path, tensors: Tensors, *, round: int = 0, **more: Any) -> Path:
    """A model as it is sent to facilities."""
    checkpoint(directory, tensors, **more)
    write_manifest(directory, Manifest(kind="model", federation="test", round=round))
    return directory


def update(
    directory: Path,
    tensors: Tensors,
    *,
    base: Path,
    facility: str,
    tokens: int = 100,
    samples: int = 10,
    round: int | None = None,
    **more: Any,
) -> Path:
    """A facility's update to `base`, with report and manifest."""
    checkpoint(directory, tensors, **more)
    sent = read_manifest(base)
    number = sent.round if round is None else round
    report.write(
        directory,
        report.Report(
            federation="test",
            facility=facility,
            round=number,
            samples=samples,
            tokens=tokens,
            steps=1,
            loss_received=2.0,
            loss_returned=1.0,
            perplexity_received=7.4,
            perplexity_returned=2.7,
            training_loss=1.5,
        ),
    )
    write_manifest(
        directory,
        Manifest(kind="update", federation="test", round=number, facility=facility, base_sha256=sent.content_sha256),
    )
    return directory


def read_all(directory: Path) -> Tensors:
    opened = open_checkpoint(directory)
    return {name: opened.read(name) for name in opened.tensors}


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


@lru_cache(maxsize=16)
def _normal(seed: int, shapes: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    """Normal values in float32; drawn once, for drawing takes longer than most that is done with them."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def random_tensors(seed: int, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, scale: float = 0.02) -> Tensors:
    drawn = _normal(seed, tuple(shapes.values()))
    return {name: (values * scale).to(dtype) for name, values in zip(shapes, drawn, strict=True)}


def moved(base: Tensors, seed: int, scale: float = 1e-3) -> Tensors:
    """As after a round of training: every value a little further."""
    floating = {name: tuple(t.shape) for name, t in base.items() if t.is_floating_point()}
    steps = random_tensors(seed, floating, torch.float32, scale)
    return {name: (t.float() + steps[name]).to(t.dtype) if name in steps else t for name, t in base.items()}
