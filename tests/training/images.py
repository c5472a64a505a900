"""Pico images and image classifiers: squares in one of three places, told apart by where they are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from facility.dataset import DatasetManifest, Pixels, SplitEntry
from facility.exchange.checkpoints.image_processor import FILE, image_processor_digest
from facility.exchange.messages.manifest import sha256_of

SIDE, CLASSES = 16, ["left", "middle", "right"]
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": True,
    "size": {"height": SIDE, "width": SIDE},
    "resample": 2,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.25, 0.3, 0.35],
}


def drawn(count: int, seed: int, side: int = SIDE) -> tuple[np.ndarray, np.ndarray]:
    """Noisy images (count, 3, side, side) with a bright square, and where it is."""
    draw = np.random.default_rng(seed)
    values = draw.integers(0, 120, (count, 3, side, side)).astype(np.uint8)
    labels = draw.integers(0, len(CLASSES), count)
    for image, label in zip(values, labels, strict=True):
        row, column = draw.integers(0, SIDE - 5), label * 5
        image[:, row : row + 5, column : column + 5] += 120
    return values, labels.astype(np.int32)


def processor_of(side: int) -> dict[str, Any]:
    """What makes a model's input of an image."""
    return PROCESSOR | {"size": {"height": side, "width": side}}


def write_images(
    directory: Path, *, train: int = 40, validation: int = 10, seed: int = 0, side: int = SIDE, **changes: Any
) -> Path:
    """A prepared dataset of drawn images."""
    directory.mkdir(parents=True)
    (directory / "image_processor").mkdir()
    (directory / "image_processor" / FILE).write_text(json.dumps(processor_of(side)))
    splits = {}
    for name, count in (("train", train), ("validation", validation)):
        values, labels = drawn(count, seed + (name == "validation") * 1000, side)
        np.save(directory / f"{name}.npy", values.reshape(count, -1))
        np.save(directory / f"{name}.rows.npy", labels[:, None])
        splits[name] = SplitEntry(
            blocks=count,
            documents=count,
            empty_documents=0,
            tokens=count,
            tail_tokens=0,
            sha256=sha256_of(directory / f"{name}.npy"),
            rows_sha256=sha256_of(directory / f"{name}.rows.npy"),
        )
    fields: dict[str, Any] = {
        "task": "image-classification",
        "block_tokens": 1,
        "vocabulary_size": len(CLASSES),
        "tokenizer_sha256": "",
        "template": "",
        "classes": CLASSES,
        "pixels": Pixels(
            channels=3,
            height=side,
            width=side,
            rescale=PROCESSOR["rescale_factor"],
            mean=PROCESSOR["image_mean"],
            std=PROCESSOR["image_std"],
            processor_sha256=image_processor_digest(directory / "image_processor") or "",
        ),
        "splits": splits,
        "sources": [],
    }
    (directory / "dataset.json").write_text(json.dumps(dataclasses.asdict(DatasetManifest(**(fields | changes)))))
    return directory


def image_config(family: str, **changes: Any) -> Any:
    """Configuration of a pico vit or resnet for the drawn images."""
    from transformers import ResNetConfig, ViTConfig

    names = {"num_labels": len(CLASSES), "id2label": dict(enumerate(CLASSES))}
    if family == "resnet":
        small = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
        return ResNetConfig(**(names | small | changes))
    small = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": SIDE,
        "patch_size": 4,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return ViTConfig(**(names | small | changes))


def save_image_model(directory: Path, family: str, **changes: Any) -> Path:
    """A randomly initialised pico image classifier with its image processor's file."""
    import torch
    from transformers import AutoModelForImageClassification

    torch.manual_seed(0)
    AutoModelForImageClassification.from_config(image_config(family, **changes)).save_pretrained(directory)
    (directory / FILE).write_text(json.dumps(PROCESSOR))
    return directory
