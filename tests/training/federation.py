"""A pico dataset and settings, and the trainer run as a user runs it: a command, one process or several."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from facility.dataset import DatasetManifest, SplitEntry
from facility.exchange.messages.manifest import sha256_of
from tests.distributed import Started
from tests.ports import free_port


def write_dataset(
    directory: Path,
    *,
    train: int = 40,
    validation: int = 10,
    block_tokens: int = 16,
    vocabulary: int = 128,
    seed: int = 0,
) -> Path:
    """Blocks of a sequence that a model can learn: each token is the one before plus one or two."""
    draw = np.random.default_rng(seed)
    directory.mkdir(parents=True)
    splits = {}
    for name, blocks in (("train", train), ("validation", validation)):
        steps = draw.integers(1, 3, size=(blocks, block_tokens))
        ids = ((draw.integers(0, vocabulary, size=(blocks, 1)) + steps.cumsum(1)) % vocabulary).astype(np.int32)
        np.save(directory / f"{name}.npy", ids)
        splits[name] = SplitEntry(
            blocks=blocks,
            documents=blocks,
            empty_documents=0,
            tokens=ids.size,
            tail_tokens=0,
            sha256=sha256_of(directory / f"{name}.npy"),
        )
    manifest = DatasetManifest(
        task="causal-lm",
        block_tokens=block_tokens,
        vocabulary_size=vocabulary,
        tokenizer_sha256="0" * 64,
        template="{text}",
        splits=splits,
        sources=[],
    )
    (directory / "dataset.json").write_text(json.dumps(dataclasses.asdict(manifest)))
    return directory


def write_masked_words(directory: Path, *, train: int = 40) -> Path:
    """`write_dataset` for masked language modelling, with a tokenizer that has a mask token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    write_dataset(directory, train=train)
    words = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2} | {f"w{i}": i for i in range(3, 128)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, mask_token="[MASK]", pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(directory / "tokenizer")
    raw = json.loads((directory / "dataset.json").read_text())
    (directory / "dataset.json").write_text(json.dumps(raw | {"task": "masked-lm"}))
    return directory


# Of AdamW, in comparisons: with 1e-8, rounding of a gradient near zero (as a key's bias has) visibly changes a step.
EPSILON = 1e-6


def write_settings(path: Path, *, rounds: int = 3, seed: int = 7, facility: str = "north", **training: Any) -> Path:
    defaults = {
        "steps": 3,
        "batch_sequences": 4,
        "learning_rate": 2e-3,
        "epsilon": EPSILON,
        "export_dtype": "float32",
        "device": os.environ.get("CROSSFED_TEST_DEVICE", "cpu"),
        "threads": 1,
    }
    raw = {"federation": "pico", "facility": facility, "rounds": rounds, "seed": seed, "training": defaults | training}
    path.write_text(json.dumps(raw))
    return path


def train(
    out: Path,
    model: Path,
    dataset: Path,
    settings: Path,
    *,
    ranks: int = 1,
    round: int = 0,
    timeout: float = 200,
    expect: int | None = 0,
    options: tuple[str, ...] = (),
    environment: dict[str, str] | None = None,
) -> list[subprocess.CompletedProcess]:
    """`python -m facility.train` on so many processes; state beside `out`. Every rank must end with `expect`."""
    arguments = ["--model", str(model), "--dataset", str(dataset), "--settings", str(settings)]
    arguments += ["--round", str(round), "--out", str(out), *options]
    if "--state" not in options:
        arguments += ["--state", str(out.parent / "state")]
    processes = started(arguments, out.parent / "said", ranks=ranks, environment=environment)
    try:
        results = [process.ended(seconds=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if expect is not None:
        assert [r.returncode for r in results] == [expect] * ranks, "\n".join(r.stderr for r in results)
    return results


def started(
    arguments: list[str], outputs: Path, *, ranks: int = 1, environment: dict[str, str] | None = None
) -> list[Started]:
    """The trainer's processes, started as a launcher starts them."""
    port = free_port()
    processes = []
    for rank in range(ranks):
        variables = dict(os.environ, OMP_NUM_THREADS="1", **(environment or {}))
        if ranks > 1:
            variables |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        processes.append(Started("facility.train", arguments, outputs / str(rank), variables))
    return processes


def weights(directory: Path) -> dict[str, Any]:
    from facility.exchange.checkpoints.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(directory)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def largest_difference(one: Path, other: Path) -> float:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a if a[name].numel())
