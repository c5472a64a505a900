"""An initial image classifier in the form that a federation sends: with its image processor, and perhaps a new head."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.models.published import check_finite, check_problem, check_weights, load_published, published_summary
from facility.exchange.checkpoints.image_processor import FILE, read_normalisation, read_processor
from facility.exchange.errors import InputError

SUFFIX = "ForImageClassification"
HEAD = ("classifier", "head", "fc")
"""How families call the layer that a new set of classes replaces."""
SIDE = 224
"""Of the image by which a model that takes any size is tried."""


def is_image_model(config: Any, classes: Sequence[str]) -> bool:
    """Whether it is an image classifier; with `classes`, whether it can become one and no classifier of texts.

    `config`: transformers'; None: not known.
    """
    if any(str(name).endswith(SUFFIX) for name in getattr(config, "architectures", None) or ()):
        return True
    from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

    images, texts = AutoModelForImageClassification._model_mapping, AutoModelForSequenceClassification._model_mapping
    return bool(classes) and config is not None and type(config) in images and type(config) not in texts


def save_image_classifier(source: str, out: Path, *, dtype: str, revision: str, classes: Sequence[str]) -> str:
    """Fill the directory `out` with the model and its image processor, and try both; returns what was done.

    `classes`: give it a head for these, random where the source's has other classes; none: the source's own. Raises
    `InputError` for a source that is none, `TransientError` when the hub cannot be reached.
    """
    model, fresh = loaded(source, dtype=dtype, revision=revision, classes=classes)
    model.save_pretrained(out)
    copy_processor(source, out, revision=revision)
    evaluate(out, source)
    return published_summary(out, dtype=dtype, new_classes=len(classes) if fresh else 0)


def loaded(source: str, *, dtype: str, revision: str, classes: Sequence[str]) -> tuple[Any, bool]:
    """The model, and whether its head is new. Raises `InputError`, `TransientError`."""
    from transformers import AutoModelForImageClassification

    model, found = load_published(
        AutoModelForImageClassification,
        source,
        kind="an image classifier",
        dtype=dtype,
        revision=revision,
        classes=classes,
    )
    new = sorted({*found["missing_keys"], *(str(item[0]) for item in found.get("mismatched_keys", ()))})
    strange = [name for name in new if not (classes and any(part in HEAD for part in name.split(".")))]
    check_weights(source, strange, "take a checkpoint of the whole classifier, or give --classes")
    check_problem(source, model.config)
    return model, bool(new)


def copy_processor(source: str, out: Path, *, revision: str) -> None:
    """Copy `preprocessor_config.json` as it is: facilities prepare their images by it. Raises `InputError`."""
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(source, FILE, revision=revision)
    except OSError:
        found = None
    if found is None:
        raise InputError(f"{source} holds no {FILE}: facilities need it to bring images to the model's size; add it")
    shutil.copyfile(found, out / FILE)


def evaluate(directory: Path, source: str) -> None:
    """Evaluate the saved model on a grey image. Raises `CheckpointError` for values that are not finite."""
    import torch
    from transformers import AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(directory, dtype="auto")
    channels = int(getattr(model.config, "num_channels", 3))
    size = getattr(model.config, "image_size", SIDE)
    height, width = (size, size) if isinstance(size, int) else size
    raw = read_processor(directory)
    assert raw is not None
    read_normalisation(raw, channels=channels, where=str(directory / FILE))
    with torch.no_grad():
        logits = model.eval()(pixel_values=torch.zeros(1, channels, height, width, dtype=model.dtype)).logits
    check_finite(source, logits)
