"""What `python -m facility.prepare` takes and prints where images are prepared."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from facility.dataset import PreparedDataset
from facility.preparing.said_of_records import summary_of_classes

if TYPE_CHECKING:
    from facility.preparing.output import Prepared


def add_images(arguments: argparse.ArgumentParser) -> None:
    """What an image is, and which are accepted."""
    add = arguments.add_argument
    add(
        "--image-processor",
        type=Path,
        metavar="DIR",
        help="images: directory with preprocessor_config.json (default: that of --model)",
    )
    add("--image-field", default="image", metavar="NAME", help="images: column of the image in Parquet (default image)")
    add(
        "--classes",
        nargs="+",
        default=[],
        metavar="NAME",
        help="classification, images: the classes in the order of the model's outputs, the same at every facility; a "
        "facility may lack examples of some (default: those of the training data, in order)",
    )
    add(
        "--skip-unreadable",
        action="store_true",
        help="images: leave out those that cannot be decoded, name and count them (default: the first is an error)",
    )
    add("--most-bytes", type=int, default=64 << 20, metavar="N", help="images: largest file read (default 67108864)")
    add("--most-pixels", type=int, default=50_000_000, metavar="N", help="images: most pixels decoded (default 5e7)")


def prepare_images_of(options: argparse.Namespace, progress: Callable[[str, float, int], None]) -> Prepared:
    """Images to one size, as the command line says."""
    from facility.preparing.images.build import ImageRequest, prepare_images
    from facility.preparing.images.decode import ImageLimits

    request = ImageRequest(
        inputs=options.inputs,
        processor=options.image_processor or options.model,
        out=options.out,
        image_field=options.image_field,
        label_field=options.label_field or "label",
        classes=options.classes,
        validation=options.validation,
        validation_share=options.validation_share,
        train_samples=options.train_samples,
        validation_samples=options.validation_samples,
        limits=ImageLimits(bytes=options.most_bytes, pixels=options.most_pixels),
        skip_unreadable=options.skip_unreadable,
        processes=options.processes,
        replace=options.replace,
        allow_overlap=options.allow_overlap,
    )
    return prepare_images(request, progress=progress)


def summary_of_images(dataset: PreparedDataset) -> list[str]:
    """A line for each split, and one for the classes."""
    manifest, lines = dataset.manifest, []
    assert manifest.pixels is not None
    size = f"{manifest.pixels.channels} x {manifest.pixels.height} x {manifest.pixels.width}"
    for name, split in manifest.splits.items():
        more = f", {split.dropped_documents:,} unreadable left out" if split.dropped_documents else ""
        more += f", {split.overlapping_documents:,} also in training" if split.overlapping_documents else ""
        lines.append(f"  {name}: {split.documents:,} images of {size}{more}")
    return [*lines, summary_of_classes(manifest.classes)]
