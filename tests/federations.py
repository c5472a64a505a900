"""Small federations in a temporary folder: a pico model, prepared blocks of made-up tokens, a federation.yml."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy
import yaml

from facility.dataset import DatasetManifest, SplitEntry
from facility.exchange.files.durable import write_json
from facility.exchange.messages.manifest import sha256_of
from tests.pico import save_pico


def write_dataset(
    directory: Path, *, seed: int = 0, blocks: int = 64, block_tokens: int = 16, vocabulary_size: int = 128
) -> Path:
    """A prepared dataset whose sequences count upwards by a step that depends on `seed`: easy to learn, distinct."""
    directory.mkdir(parents=True)
    random = numpy.random.default_rng(seed)
    splits = {}
    for name, count in (("train", blocks), ("validation", blocks // 4)):
        first = random.integers(0, vocabulary_size, (count, 1))
        tokens = ((first + (seed + 1) * numpy.arange(block_tokens)) % vocabulary_size).astype(numpy.int32)
        numpy.save(directory / f"{name}.npy", tokens)
        splits[name] = SplitEntry(
            blocks=count,
            documents=count,
            empty_documents=0,
            tokens=tokens.size,
            tail_tokens=0,
            sha256=sha256_of(directory / f"{name}.npy"),
        )
    manifest = DatasetManifest(
        task="causal-lm",
        block_tokens=block_tokens,
        vocabulary_size=vocabulary_size,
        tokenizer_sha256="0" * 64,
        template="{text}",
        splits=splits,
        sources=[],
    )
    write_json(directory / "dataset.json", dataclasses.asdict(manifest))
    return directory


def write_federation(
    root: Path,
    names: list[str],
    *,
    training: dict[str, Any] | None = None,
    size: dict[str, int] | None = None,
    **changes: Any,
) -> Path:
    """`root/workflow/federation.yml` of local facilities, with the model and datasets it names; returns its path.

    `size`: changes of the pico model's configuration.
    """
    save_pico(root / "model", dtype="bfloat16", **(size or {}))
    facilities = []
    for number, name in enumerate(names):
        write_dataset(root / "sites" / name / "dataset", seed=number)
        facilities.append({"name": name, "dataset": f"../sites/{name}/dataset"})
    described = {
        "name": "pico",
        "model": "../model",
        "rounds": 2,
        "seed": 3,
        "archive": "../archive",
        "workdir": "../work",
        "training": {"steps": 4, "batch_sequences": 4, "learning_rate": 1e-2, "threads": 1} | (training or {}),
        "facilities": facilities,
    } | changes
    path = root / "workflow" / "federation.yml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    return path
