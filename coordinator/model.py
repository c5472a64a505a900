"""`python -m coordinator.model`: convert an initial model to the form that a federation sends; check that it loads.

    python -m coordinator.model --source ORG/NAME --out models/NAME

    python -m coordinator.model --import-adapter ADAPTER --base BASE --out DIR

    python -m coordinator.model --export-adapter ROUND_MODEL --base BASE --out DIR [--merged]

The source is a model of the Hugging Face hub or a Hugging Face checkpoint on disk, as safetensors: a causal language
model, or an image classifier with its image processor. The second form
makes an initial model that begins with a published adapter (peft's format); the third exports the final adapter of a
federation in that format.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.adapter_export import export_adapter
from coordinator.adapter_import import import_adapter
from coordinator.image_model import is_image_classifier, save_image_classifier
from coordinator.published_model import check_finite, check_weights, load_published
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.conversion import check_names
from facility.exchange.checkpoints.families import refusal
from facility.exchange.errors import InputError, exit_on_error
from facility.exchange.files.durable import new_directory
from facility.exchange.logs import add_log_options

log = logging.getLogger("coordinator.model")

STAMP = "source.json"
DTYPES = ("bfloat16", "float16", "float32")


def convert(source: str, out: Path, *, dtype: str, revision: str, classes: Sequence[str] = ()) -> str:
    """Write the model to `out`; returns what was done. `out` appears atomically; an equal one is recognised.

    Raises `InputError` for a source that is none, `TryAgain` when the hub cannot be reached.
    """
    made_from: dict[str, Any] = {"source": source, "revision": revision, "dtype": dtype}
    made_from |= {"classes": list(classes)} if classes else {}
    if out.exists():
        try:
            same = json.loads((out / STAMP).read_text()) == made_from
        except (OSError, ValueError):
            same = False
        if not same:
            raise InputError(
                f"{out} exists and was not made from {source} in {dtype}; remove it or choose another --out"
            )
        open_checkpoint(out)
        return f"{out} is there already, made from {source}"
    folder = Path(source).expanduser()
    if (folder / "config.json").is_file():
        source_name = str(folder)
    elif folder.exists():
        raise InputError(f"{folder} holds no config.json; expected a Hugging Face checkpoint's folder")
    elif source.startswith((".", "/", "~")):
        raise InputError(f"{source} does not exist; expected a checkpoint's folder or a hub name like org/name")
    else:
        source_name = source
    if classes or is_image_classifier(source_name, revision):
        with new_directory(out) as temporary:
            told = save_image_classifier(source_name, temporary, dtype=dtype, revision=revision, classes=classes)
            (temporary / STAMP).write_text(json.dumps(made_from))
        return f"{out}: {told}"
    return load_and_save(source_name, out, dtype=dtype, revision=revision, made_from=made_from)


def load_and_save(source: str, out: Path, *, dtype: str, revision: str, made_from: dict[str, Any]) -> str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, found = load_published(
        AutoModelForCausalLM, source, kind="a causal language model", dtype=dtype, revision=revision
    )
    check_weights(source, sorted(found["missing_keys"]), "take a checkpoint of the whole causal language model")
    if reason := refusal(model.config, causal=True):
        raise InputError(f"{source} cannot be trained: {reason}")
    with new_directory(out) as temporary:
        model.save_pretrained(temporary)
        try:
            AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False).save_pretrained(temporary)
        except (OSError, ValueError, ImportError):
            log.warning("%s has no tokenizer beside it; facilities need one for facility.prepare", source)
        (temporary / STAMP).write_text(json.dumps(made_from))
        loaded = AutoModelForCausalLM.from_pretrained(temporary, dtype="auto")
        ids = torch.arange(8).reshape(1, 8) % loaded.config.get_text_config().vocab_size
        with torch.no_grad():
            check_finite(source, loaded(ids).logits)
        check_names(temporary)
        checkpoint = open_checkpoint(temporary)
        told = f"{checkpoint.parameters:,} parameters, {checkpoint.bytes / 1e9:.3g} GB in {dtype}"
    return f"{out}: {told}; loaded and evaluated, every tensor has its place"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m coordinator.model", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--source", metavar="NAME|DIR", help="hub name, or Hugging Face checkpoint")
    subject.add_argument("--export-adapter", type=Path, metavar="DIR", help="model of a round whose adapters to export")
    subject.add_argument("--import-adapter", type=Path, metavar="DIR", help="published adapter to begin with")
    parser.add_argument("--base", type=Path, metavar="DIR", help="with an adapter: the model that it adapts")
    parser.add_argument(
        "--merged",
        action="store_true",
        help="with --export-adapter: also write DIR/merged, base and adapters as one model",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory to make")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="bfloat16",
        help="dtype that travels (default bfloat16)",
    )
    parser.add_argument("--revision", default="main", metavar="NAME", help="revision of a hub model (default main)")
    parser.add_argument(
        "--classes",
        nargs="+",
        default=[],
        metavar="NAME",
        help="an image classifier for these classes, in this order; its head is new where the source has others",
    )
    add_log_options(parser)
    arguments = parser.parse_args()
    adapter = arguments.export_adapter or arguments.import_adapter
    if (adapter is None) != (arguments.base is None):
        parser.error("--export-adapter or --import-adapter, and --base belong together")
    if arguments.import_adapter is not None:
        print(import_adapter(adapter, base=arguments.base.resolve(), out=arguments.out.resolve()))
        return 0
    if arguments.export_adapter is not None:
        base, out = arguments.base.resolve(), arguments.out.resolve()
        print(export_adapter(arguments.export_adapter, base=base, out=out, merged=arguments.merged))
        return 0
    out, classes = arguments.out.resolve(), arguments.classes
    if classes and len(set(classes)) < max(2, len(classes)):
        parser.error("--classes: expected two names or more, each once")
    print(convert(arguments.source, out, dtype=arguments.dtype, revision=arguments.revision, classes=classes))
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
