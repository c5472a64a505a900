"""Image classification: pixels, targets, and augmentation drawn from seeds that every layout shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from facility.dataset import Pixels, PreparedDataset
from facility.exchange.checkpoints.tokenizer import tokenizers_differ
from facility.exchange.errors import InputError
from facility.exchange.messages.images import ImageSettings
from facility.training.data.classes import check_classes
from facility.training.data.tasks import Batch, TaskDefaults


class ImageClassification(TaskDefaults):
    """Cross entropy over the classes. Values go to the device as stored, a byte each, and are normalised there."""

    name = "image-classification"
    main_input = "pixel_values"
    answers = True

    def __init__(self, pixels: Pixels, settings: ImageSettings) -> None:
        self.pixels, self.settings = pixels, settings

    def batch(self, dataset: PreparedDataset, split: str, indices: np.ndarray, seeds: list[int]) -> Batch:
        """Training images are augmented as the settings ask, validation images are not."""
        stored = np.asarray(dataset.split(split)[indices]).reshape(len(indices), *self.pixels.shape)
        values = torch.from_numpy(stored.copy())
        if split == "train":
            for row, seed in enumerate(seeds):
                values[row] = augmented(values[row], self.settings, seed)
        labels = np.asarray(dataset.labels(split)[indices], dtype=np.int64)
        return Batch(inputs={"pixel_values": values}, targets=torch.from_numpy(labels.copy()))

    def on_device(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rescale and normalise as the model's image processor does, in float32."""
        values = inputs["pixel_values"]
        mean, std = (torch.tensor(n, device=values.device).view(-1, 1, 1) for n in (self.pixels.mean, self.pixels.std))
        return inputs | {"pixel_values": (values.float() * self.pixels.rescale - mean) / std}


def augmented(image: torch.Tensor, settings: ImageSettings, seed: int) -> torch.Tensor:
    """The image (channels, height, width), cut at a random place of itself within a black frame, perhaps mirrored."""
    if not settings.crop_padding and not settings.flip:
        return image
    draw = np.random.Generator(np.random.PCG64(seed))
    down, right = draw.integers(0, 2 * settings.crop_padding + 1, 2).tolist()
    mirrored = draw.random() < 0.5
    if pad := settings.crop_padding:
        _, height, width = image.shape
        framed = torch.nn.functional.pad(image, (pad, pad, pad, pad))
        image = framed[:, down : down + height, right : right + width]
    return image.flip(-1) if settings.flip and mirrored else image


def image_task(dataset: PreparedDataset, config: Any, settings: ImageSettings) -> ImageClassification:
    """The task of an image dataset. Raises `InputError` where the model does not fit it."""
    manifest = dataset.manifest
    assert manifest.pixels is not None
    check_classes(dataset, config)
    check_size(dataset, config)
    return ImageClassification(manifest.pixels, settings)


def check_size(dataset: PreparedDataset, config: Any) -> None:
    """Refuse images of another size or other channels than the model takes."""
    pixels = dataset.manifest.pixels
    assert pixels is not None
    channels, size = getattr(config, "num_channels", pixels.channels), getattr(config, "image_size", None)
    height, width = (size, size) if isinstance(size, int) else (size or (pixels.height, pixels.width))
    fixed = positions_of(config) > 1  # others take images of any size
    if channels != pixels.channels or (fixed and (height, width) != (pixels.height, pixels.width)):
        raise InputError(
            f"{dataset.directory} has images of {' x '.join(map(str, pixels.shape))}, the model takes {channels} x "
            f"{height} x {width}: prepare with the model's own image processor"
        )


def positions_of(config: Any) -> int:
    """Positions that a transformer makes of an image; 1 for a model that knows no patches."""
    size, patch = (getattr(config, name, None) for name in ("image_size", "patch_size"))
    if not size or not patch:
        return 1
    pairs = [value if isinstance(value, list | tuple) else (value, value) for value in (size, patch)]
    return 1 + (pairs[0][0] // pairs[1][0]) * (pairs[0][1] // pairs[1][1])


def check_processor(dataset: PreparedDataset, ours: str | None) -> None:
    """Refuse images that another image processor made than the model's, of the digest `ours`; None: not known."""
    pixels = dataset.manifest.pixels
    assert pixels is not None
    if tokenizers_differ(pixels.processor_sha256, ours):
        raise InputError(
            f"{dataset.directory} was made by another image processor than the model's ({pixels.processor_sha256} "
            f"against {ours}): prepare it with the model's preprocessor_config.json"
        )
