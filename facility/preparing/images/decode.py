"""One image from bytes of unknown origin to the values that the model's image processor makes of it.

Decoded by Pillow, within limits: bytes before the file is read, pixels before they are decompressed. Only formats that
Pillow decodes by itself are opened (no EPS, which starts Ghostscript). The processor is transformers' own with Pillow
as its backend, so that no torchvision is needed; it resizes and crops, and the values stay whole numbers: rescaling and
normalisation are for the device that trains.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from facility.dataset import DatasetError, Pixels
from facility.exchange.checkpoints.image_processor import (
    FILE,
    Normalisation,
    channels_of,
    image_processor_digest,
    read_normalisation,
    read_processor,
)

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "DIB", "GIF", "TIFF", "PPM")
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV", "LAB")
"""Eight bits a channel, or fewer: an image of sixteen bits or of floating-point values has no agreed range."""
STILL = ("JPEG", "MPO")
"""Formats of one picture, whatever previews lie beside it."""
MOST_PIXELS = 178_956_970
"""Pillow opens no larger image."""
SCALES = ("do_rescale", "do_normalize", "include_top")
"""What a processor is asked not to do, where it knows it: `include_top` of EfficientNet's divides once more."""
SIDE = 16
"""Of the image by which the processor is tried."""


@dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """What is decoded at most."""

    bytes: int = 64 << 20
    """Most bytes of an encoded image."""
    pixels: int = 50_000_000
    """Of a decoded one: 150 MB in colour."""


class Decoder:
    """Decodes images and brings them to the model's size."""

    def __init__(self, directory: Path, limits: ImageLimits) -> None:
        """`directory`: the image processor's, or that of a model with it. Raises `DatasetError`."""
        self.limits = limits
        raw, digest = read_processor(directory), image_processor_digest(directory)
        if raw is None or digest is None:
            raise DatasetError(f"{directory} holds no {FILE}: expected an image processor, or a model that carries one")
        self.channels = channels_of(raw)
        if self.channels not in (1, 3):
            raise DatasetError(f"{directory / FILE} is for {self.channels} channels, expected 1 (grey) or 3 (colour)")
        self.processor = load_processor(directory)
        self.unscaled = {name: False for name in SCALES if hasattr(self.processor, name)}
        said = read_normalisation(raw, channels=self.channels, where=str(directory / FILE))
        trial = self._trial()
        values = self._processed(trial, "a trial image")
        scale = self._normalisation(trial, values, said, directory)
        _, height, width = values.shape
        self.pixels = Pixels(
            channels=self.channels,
            height=height,
            width=width,
            rescale=scale.rescale,
            mean=list(scale.mean),
            std=list(scale.std),
            processor_sha256=digest,
        )

    def _trial(self) -> Any:
        """An image of every brightness."""
        from PIL import Image

        draw = numpy.random.Generator(numpy.random.PCG64(0))
        values = draw.integers(0, 256, (SIDE, SIDE, self.channels), dtype=numpy.uint8)
        return Image.fromarray(values if self.channels == 3 else values[:, :, 0])

    def _normalisation(self, image: Any, values: numpy.ndarray, said: Normalisation, where: Path) -> Normalisation:
        """How the processor itself scales the values of the trial image.

        `said`: what its file says, which is returned where that is it. A file may leave a key to the default of the
        processor's class (MobileViT: no normalisation, Bit and LeViT: means of their own), and some scale twice
        (EfficientNet). Raises `DatasetError` where values are not scaled by channel.
        """
        try:
            made = numpy.asarray(self.processor([image], return_tensors="np")["pixel_values"][0], dtype=numpy.float64)
        except Exception as error:  # whatever a processor raises
            raise DatasetError(f"{where / FILE}: the image processor cannot scale an image: {error}"[:300]) from None
        if made.shape == values.shape and scaled_by(said, values, made):
            return said
        pairs = list(zip(values, made, strict=True)) if made.shape == values.shape else []
        lines = [numpy.polyfit(one.ravel().astype(numpy.float64), other.ravel(), 1) for one, other in pairs]
        if lines and all(slope > 0 for slope, _ in lines):
            found = Normalisation(
                rescale=said.rescale,
                mean=tuple(float(-offset / slope * said.rescale) for slope, offset in lines),
                std=tuple(float(said.rescale / slope) for slope, _ in lines),
            )
            if scaled_by(found, values, made):
                return found
        raise DatasetError(
            f"{where / FILE}: the image processor does more with the values of an image than to scale each channel: "
            "such a model cannot be trained on images that are stored once"
        )

    def decode(self, data: bytes, name: str) -> numpy.ndarray:
        """uint8 values of channels x height x width. Raises `DatasetError` that names the image and the reason."""
        image = self._opened(data, name)
        values = self._processed(image, name)
        if values.shape != self.pixels.shape:
            raise DatasetError(
                f"{name}: the image processor made {values.shape} of it, of others {self.pixels.shape}: it must crop "
                f"or resize to one size ({FILE})"
            )
        return values

    def _opened(self, data: bytes, name: str) -> Any:
        """The decoded image, upright, in colour or grey as the model takes it."""
        from PIL import Image, ImageOps

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of Pillow's, on what is refused below or harmless
                stored = Image.open(io.BytesIO(data), formats=FORMATS)
                self._check(stored, name)
                stored.load()
                return ImageOps.exif_transpose(stored).convert("RGB" if self.channels == 3 else "L")
        except DatasetError:
            raise
        except Image.DecompressionBombError:
            raise DatasetError(
                f"{name} has more than {MOST_PIXELS:,} pixels, at most {self.limits.pixels:,} are decoded "
                "(--most-pixels)"
            ) from None
        except Image.UnidentifiedImageError:
            raise DatasetError(f"{name} cannot be decoded: it is not an image of {', '.join(FORMATS)}") from None
        except Exception as error:  # a damaged file raises whatever its decoder raises
            raise DatasetError(f"{name} cannot be decoded: {type(error).__name__}: {error}"[:300]) from None

    def _check(self, image: Any, name: str) -> None:
        """Refuse by what the header says, before anything is decompressed."""
        width, height = image.size
        if width * height > self.limits.pixels or width < 1 or height < 1:
            raise DatasetError(
                f"{name} has {width} x {height} pixels, at most {self.limits.pixels:,} are decoded (--most-pixels)"
            )
        if image.mode not in MODES:
            raise DatasetError(
                f"{name} has the mode {image.mode} (values of more than eight bits), expected grey or colour of eight "
                "bits a channel: convert it first"
            )
        if image.format not in STILL and getattr(image, "n_frames", 1) > 1:
            raise DatasetError(f"{name} holds {image.n_frames} pictures, expected one: choose one and save it alone")

    def _processed(self, image: Any, name: str) -> numpy.ndarray:
        try:
            made = self.processor([image], return_tensors="np", **self.unscaled)["pixel_values"][0]
        except Exception as error:  # whatever a processor raises for sizes that it cannot make
            raise DatasetError(f"{name}: the image processor cannot take it: {error}"[:300]) from None
        values = numpy.asarray(made)
        if values.ndim != 3 or values.shape[0] != self.channels:
            raise DatasetError(f"{name}: the image processor made an array of shape {values.shape} of it")
        return values if values.dtype == numpy.uint8 else numpy.clip(numpy.rint(values), 0, 255).astype(numpy.uint8)


def scaled_by(scale: Normalisation, values: numpy.ndarray, made: numpy.ndarray) -> bool:
    """Whether the processor's result is these values, scaled so; half a value is what rounding may take."""
    mean, std = (numpy.array(one)[:, None, None] for one in (scale.mean, scale.std))
    error = numpy.abs((values * scale.rescale - mean) / std - made)
    return bool(
        (error <= 0.51 * scale.rescale / std + 1e-5).all() and (error.mean() <= 0.3 * scale.rescale / std).all()
    )


def load_processor(directory: Path) -> Any:
    """transformers' image processor over Pillow, from disk only and without code from there. Raises `DatasetError`."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(
            str(directory), backend="pil", local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a damaged file raises whatever its parser raises
        raise DatasetError(f"{directory}: the image processor cannot be loaded: {error}"[:400]) from None
