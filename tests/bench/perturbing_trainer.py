"""Stand-in for `facility.train` at any size: the received weights come back with their lowest bits changed.

Everything of a round but the training itself: the model is verified, read in pieces, and written with its digests
made on the way. Nothing grows with the model but the files. With `training.lora.base` the base's header is read, as a
trainer opens it, and the adapters alone come back.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np

from facility.exchange.checkpoints.adapters import CONFIG
from facility.exchange.checkpoints.checkpoint import ADAPTER, Checkpoint, open_checkpoint, read_exactly
from facility.exchange.checkpoints.writer import TensorWriter, layout_like
from facility.exchange.files.durable import new_directory
from facility.exchange.messages import report
from facility.exchange.messages.manifest import Manifest, verify_manifest, write_manifest
from facility.exchange.messages.settings import read_facility_settings
from facility.exchange.perplexity import perplexity

PIECE = 8 << 20


def perturb(received: Checkpoint, out: Path, seed: int) -> dict[str, str]:
    """Write the tensors with the lowest bit of each 16-bit half drawn anew; returns the files' digests."""
    draw = np.random.default_rng(seed)
    masks = draw.integers(0, 2, PIECE // 2, dtype=np.uint16)
    layout = layout_like(received, {name: entry.dtype for name, entry in received.tensors.items()})
    if {entry.file.name for entry in received.tensors.values()} == {ADAPTER}:
        layout = {ADAPTER: next(iter(layout.values()))}
    with TensorWriter(out, layout, hashed=True) as writer:
        for name in writer.places:
            entry, buffer = received.tensors[name], bytearray(PIECE)
            with open(entry.file, "rb", buffering=0) as file:
                for offset in range(0, entry.size, PIECE):
                    piece = memoryview(buffer)[: min(PIECE, entry.size - offset)]
                    read_exactly(file.fileno(), piece, entry.start + offset, entry.file)
                    values = np.frombuffer(piece, np.uint16)
                    values ^= masks[: len(values)]
                    writer.write(name, offset, piece)
        return writer.digests()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "dataset", "settings", "out", "state"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--round", type=int, required=True)
    parser.add_argument("--progress", action="store_true")
    given, _ = parser.parse_known_args()
    settings = read_facility_settings(given.settings)
    base, received = verify_manifest(given.model), open_checkpoint(given.model)
    lora = settings.training.lora
    if lora.base:
        print(f"base of {open_checkpoint(Path(lora.base)).parameters} parameters opened", flush=True)
    steps = settings.training.steps if given.round < settings.rounds else 0
    with new_directory(given.out) as out:
        known = {}
        if steps:
            known = perturb(received, out, hash_of(settings.facility) + given.round)
        if lora.rank and (given.model / CONFIG).is_file():
            (out / CONFIG).write_bytes((given.model / CONFIG).read_bytes())
        report.write(
            out,
            report.Report(
                federation=settings.federation,
                facility=settings.facility,
                round=given.round,
                samples=steps,
                tokens=steps,
                steps=steps,
                loss_received=2.0,
                loss_returned=1.9,
                perplexity_received=perplexity(2.0),
                perplexity_returned=perplexity(1.9),
                training_loss=1.9,
            ),
        )
        manifest = Manifest(
            kind="update",
            federation=settings.federation,
            facility=settings.facility,
            round=given.round,
            base_sha256=base.content_sha256,
            encoding="lora" if lora.rank else "full",
            dtypes=received.dtypes(),
            parameters=received.parameters,
        )
        write_manifest(out, manifest, known)
    return os.EX_OK


def hash_of(word: str) -> int:
    """The same in every process."""
    return int.from_bytes(word.encode()[-6:], "big")


if __name__ == "__main__":
    sys.exit(main())
