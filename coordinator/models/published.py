"""Load a published model with nothing executed and no weight made up; try that what it computes is finite."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from facility.exchange.checkpoints.adapters import CONFIG
from facility.exchange.checkpoints.checkpoint import open_checkpoint, shards_of
from facility.exchange.checkpoints.companions import TENSORS, refuse_links_elsewhere
from facility.exchange.checkpoints.conversion import check_names
from facility.exchange.checkpoints.labels import ONE_OF_SEVERAL, other_problem
from facility.exchange.checkpoints.task_class import OWN_ATTENTION
from facility.exchange.errors import CheckpointError, InputError, TransientError, first_line, named_line
from facility.exchange.files import present
from facility.exchange.sizes import format_bytes


def no_bars_in_a_file() -> None:
    """Switch the progress bars of transformers and the hub off where stderr is not a terminal."""
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def load_published(
    factory: Any, source: str, *, kind: str, dtype: str, revision: str, classes: Sequence[str] = ()
) -> tuple[Any, dict[str, Any]]:
    """The model of one of transformers' automatic classes, and what its loading reports.

    `kind`: what it is expected to be, with its article, for the error. `classes`: of a head that may be new, drawn
    from a fixed seed; none: the model's own head. Raises `InputError` for a source that is none,
    `TransientError` when the hub cannot be reached.
    """
    import torch

    refuse_adapters(source, revision)
    options: dict[str, Any] = {}
    if classes:
        options = {"num_labels": len(classes), "id2label": dict(enumerate(classes))}
        options |= {"label2id": {name: number for number, name in enumerate(classes)}, "ignore_mismatched_sizes": True}
        options["problem_type"] = ONE_OF_SEVERAL
    torch.manual_seed(0)
    try:
        model, found = factory.from_pretrained(
            source,
            dtype=getattr(torch, dtype),
            revision=revision,
            trust_remote_code=False,
            use_safetensors=True,
            attn_implementation=OWN_ATTENTION,
            output_loading_info=True,
            **options,
        )
    except OSError as error:
        known = InputError if present.exists(Path(source)) else TransientError
        raise known(f"{source} could not be loaded: {first_line(error)}") from None
    except ValueError as error:
        raise InputError(f"{source} is not {kind} that transformers knows: {first_line(error)}") from None
    except Exception as error:  # whatever the values of config.json lead to
        raise InputError(
            f"transformers cannot make {kind} of {source}: {named_line(error)}; expected a config.json that fits its "
            "weights"
        ) from None
    if (quantized := getattr(model.config, "quantization_config", None)) is not None:
        method = getattr(quantized, "quant_method", None) or "unknown"
        raise InputError(
            f"{source} is quantized ({getattr(method, 'value', method)}), and plain weights are trained and averaged; "
            "take the checkpoint that it was made from (training.lora.quantize_base quantizes one at a facility)"
        )
    return model, found


def refuse_files_elsewhere(folder: Path) -> None:
    """Raise `InputError` for a download whose links or index lead to files of other folders. Weights alone may lie
    elsewhere, by a link, as on a larger disk."""
    refuse_links_elsewhere(folder, but=TENSORS)
    shards_of(folder)


def refuse_adapters(source: str, revision: str) -> None:
    """Raise `InputError` for a source with an adapter_config.json: transformers loads what it names, which is any model
    of the hub and any module that begins with `megatron`, as it loads the model beside it."""
    if file_of(source, CONFIG, revision) is not None:
        raise InputError(
            f"{source} holds {CONFIG}, so that another model or module that it names would be loaded too; expected a "
            "plain model: begin with an adapter by --import-adapter and --base, or remove that file"
        )


def file_of(source: str, name: str, revision: str) -> Path | None:
    """A file of a folder or of a model of the hub, from its cache or fetched; None where there is none, or nothing
    answers: then the model's own files are no more to be had."""
    from transformers.utils.hub import cached_file

    try:
        found = cached_file(source, name, revision=revision)
    except OSError:
        return None
    return None if found is None else Path(found)


def published_summary(directory: Path, *, dtype: str, new_classes: int) -> str:
    """What was made of a published model, in a line, once each of its tensors has its place. Raises `CheckpointError`.

    `new_classes`: of a head that is new; 0: it has none.
    """
    check_names(directory)
    checkpoint = open_checkpoint(directory)
    head = f"; a new head of {new_classes} classes" if new_classes else ""
    held = f"{checkpoint.parameters:,} parameters, {format_bytes(checkpoint.bytes)} in {dtype}"
    return f"{held}{head}; loaded and evaluated, every tensor has its place"


def check_weights(source: str, lacking: list[str], advice: str) -> None:
    """Raise `InputError` for tensors that config.json asks for and the checkpoint does not hold."""
    if lacking:
        raise InputError(
            f"{source} holds no weights for {lacking[0]!r} ({len(lacking)} in all), which its config.json asks for: "
            f"transformers would fill them at random; {advice}"
        )


def check_problem(source: str, config: Any) -> None:
    """Raise `InputError` for a classifier that does not name one class of several, such as one that scores a text."""
    if problem := other_problem(vars(config)):
        raise InputError(
            f"{source} has problem_type {problem!r} in its config.json, and one class for each example is what is "
            "trained here: its answers would be read otherwise; give --classes, of which each example has one"
        )


def check_finite(source: str, logits: Any) -> None:
    """Raise `CheckpointError` for values that are not finite."""
    import torch

    if not torch.isfinite(logits.float()).all():
        raise CheckpointError(
            f"{source} gives values that are not finite; use another --dtype (float16 overflows easily)"
        )
