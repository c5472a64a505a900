"""Options of `python -m facility.prepare` that are missing, or that belong to another kind of data than is prepared."""

from __future__ import annotations

import argparse

from facility.dataset import IMAGES
from facility.exchange.command_line import changed_options, refuse_unused

TEXT_OPTIONS = (
    *("text_field", "text_unit", "loss", "split", "validation_split", "streaming", "temperature"),
    *("near_duplicates", "signature_salt", "share_signatures", "drop_signatures", "language"),
)
"""Options that images have no use for, beside those that are missed more often."""


def check_options(arguments: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with a message where an option is missing, or belongs to another kind of data."""
    changed = changed_options(arguments, options)
    if not options.validation:
        refuse_unused(changed, ("validation_split",), "without --validation")
    if options.task == IMAGES:
        if not (options.image_processor or options.model):
            arguments.error("images need --image-processor, or --model with a model that carries one")
        texts = ("tokenizer", "block_tokens", "template", "chat_template", "documents", "pair_field", "show", "weights")
        if given := [name for name in texts if getattr(options, name)]:
            arguments.error(f"--{given[0].replace('_', '-')} is for text; the task is {options.task}")
        refuse_unused(changed, TEXT_OPTIONS, f"on {IMAGES}")
        return
    refuse_unused(changed, ("image_field", "most_bytes", "most_pixels"), "on text")
    if options.task in ("chat", "preference"):
        refuse_unused(
            changed, ("text_field", "text_unit"), f"on {options.task}, whose records have fields of their own"
        )
    if missing := [name for name in ("tokenizer", "block_tokens") if getattr(options, name) is None]:
        arguments.error(f"text needs --{missing[0].replace('_', '-')}")
    if options.classes and options.task != "classification":
        arguments.error(f"--classes is for classification and images; the task is {options.task}")
    if given := [name for name in ("image_processor", "skip_unreadable") if getattr(options, name)]:
        arguments.error(f"--{given[0].replace('_', '-')} is for images; the task is {options.task}")
