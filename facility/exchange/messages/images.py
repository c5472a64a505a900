"""How images are trained on: part of `training:`."""

from __future__ import annotations

from facility.exchange.validation import NonNegative, validated


@validated(frozen=True, kw_only=True)
class ImageSettings:
    """Augmentation of training images, for datasets of `--task image-classification`. What is drawn depends on the
    federation's seed and the position in the facility's data alone, so that every layout trains on the same images."""

    crop_padding: NonNegative[int] = 0
    """Pixels of black added on each side before an image is cut to its size again at a random place; 0: off."""
    flip: bool = False
    """Mirror every second image, drawn at random, left to right."""
