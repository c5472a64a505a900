"""Handmade updates: a model whose weights moved by a known amount, with report and manifest as from a facility."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from facility.exchange.checkpoints.checkpoint import open_checkpoint, save_tensors
from facility.exchange.messages import report
from facility.exchange.messages.manifest import Manifest, read_manifest, run_of, with_run, write_manifest


def write_update(
    directory: Path,
    model: Path,
    facility: str,
    *,
    round: int = 0,
    move: float = 0.01,
    tokens: int = 100,
    loss: float = 2.0,
) -> Path:
    """An update of `facility` to `model` in which every weight is larger by `move`."""
    base, checkpoint = read_manifest(model), open_checkpoint(model)
    directory.mkdir(parents=True)
    save_tensors(
        directory, ((name, (checkpoint.read(name).float() + move).to(torch.bfloat16)) for name in checkpoint.tensors)
    )
    shutil.copyfile(model / "config.json", directory / "config.json")
    told = report.Report(
        federation=base.federation,
        facility=facility,
        round=round,
        samples=10,
        tokens=tokens,
        steps=1,
        loss_received=loss,
        loss_returned=loss,
        perplexity_received=7.0,
        perplexity_returned=7.0,
        training_loss=loss,
    )
    report.write(directory, told)
    write_manifest(
        directory,
        Manifest(
            kind="update", federation=base.federation, round=round, facility=facility, base_sha256=base.content_sha256
        ),
    )
    with_run(directory, run_of(base))
    return directory
