"""`python -m coordinator.model`: convert an initial model to the form that a federation sends; check that it loads.

    python -m coordinator.model --source ORG/NAME --out models/NAME

    python -m coordinator.model --import-adapter ADAPTER --base BASE --out DIR

    python -m coordinator.model --export-adapter ROUND_MODEL --base BASE --out DIR [--merged]

The source is a model of the Hugging Face hub or a Hugging Face checkpoint on disk, as safetensors: a causal or masked
language model, a sequence classifier, or an image classifier with its image processor. The second form makes an
initial model that begins with a published adapter (peft's format); the third exports the final adapter of a federation
in that format.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from coordinator.models.adapter_export import export_adapter
from coordinator.models.adapter_import import import_adapter
from coordinator.models.image import is_image_model, save_image_classifier
from coordinator.models.published import no_bars_in_a_file, refuse_files_elsewhere
from coordinator.models.text import kind_of, save_text_model
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.companions import SOURCE
from facility.exchange.checkpoints.task_class import check_layers
from facility.exchange.command_line import changed_options, parse_arguments, refuse_unused
from facility.exchange.errors import CrossFedError, InputError, TransientError, exit_on_error, named_line
from facility.exchange.files import present
from facility.exchange.files.bounded import real_path
from facility.exchange.files.durable import as_umask_allows, new_directory
from facility.exchange.files.storage import name_in_errors
from facility.exchange.files.unwinding import unwound_by_signals
from facility.exchange.hub import offline_if_silent
from facility.exchange.json_values import note_in
from facility.exchange.logs import add_log_options
from facility.exchange.text import one_line

DTYPES = ("bfloat16", "float16", "float32")
HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[\w.-]+", re.ASCII)
"""What the Hugging Face hub can have: a name, with its owner before it."""


def convert_model(source: str, out: Path, *, dtype: str, revision: str, classes: Sequence[str] = ()) -> str:
    """Write the model to `out`; returns what was done. `out` appears atomically; an equal one is recognised.

    Raises `InputError` for a source that is none, `TransientError` when the hub cannot be reached.
    """
    no_bars_in_a_file()
    check_class_names(classes)
    made_from: dict[str, Any] = {"source": source, "revision": revision, "dtype": dtype}
    made_from |= {"classes": list(classes)} if classes else {}
    if os.path.lexists(out):
        if note_in(out / SOURCE) != made_from:
            raise InputError(
                f"{out} exists and was not made from {source} in {dtype}; remove it or choose another --out"
            )
        open_checkpoint(out)
        return f"{out} is there already, made from {source}"
    folder = Path(source).expanduser()
    if present.exists(folder) and revision != "main":
        raise InputError(f"--revision has no effect with the folder {folder}: it is for a model of the hub")
    source_name = check_source(source)
    with nullcontext("") if present.exists(folder) else offline_if_silent() as silence:
        try:
            summary = _written(source_name, out, made_from, classes)
        except TransientError as error:
            more = f"; {silence}, and neither a folder here nor this machine's cache has that name" if silence else ""
            raise TransientError(f"{error}{more}") from None
    return f"{out}: {summary}"


def check_source(source: str) -> str:
    """The folder or hub name by which transformers loads the source. Raises `InputError` for what is neither; the hub
    is not asked."""
    folder = Path(source).expanduser()
    if present.is_file(folder / "config.json"):
        refuse_files_elsewhere(folder)
        return str(folder)
    if present.exists(folder):
        raise InputError(f"{folder} holds no config.json; expected a Hugging Face checkpoint's folder")
    if folder.is_symlink():
        raise InputError(f"{folder} is a link that leads nowhere; expected a Hugging Face checkpoint's folder")
    if source.startswith((".", "/", "~")):
        raise InputError(f"{source} does not exist; expected a checkpoint's folder or a hub name like org/name")
    if not HUB_NAME.fullmatch(source):
        raise InputError(f"{source!r} is neither a folder here nor a name of the hub; expected one like org/name")
    return source


def _written(source: str, out: Path, made_from: dict[str, Any], classes: Sequence[str]) -> str:
    """Make `out` of what transformers loads by the name or folder; returns what was done. Raises as `convert_model`."""
    with unwound_by_signals(), new_directory(out) as temporary:
        try:
            with name_in_errors(out):
                summary = _saved(source, temporary, made_from["dtype"], made_from["revision"], classes)
        except (CrossFedError, OSError):
            raise
        except Exception as error:  # whatever the values of config.json lead to once the model is loaded
            expected = "expected a config.json that fits its weights"
            raise InputError(f"{source} cannot be used: {named_line(error)}; {expected}") from None
        for weights in temporary.glob("*.safetensors"):  # safetensors writes 0600 whatever the umask
            weights.chmod(as_umask_allows(0o644))
        (temporary / SOURCE).write_text(json.dumps(made_from), encoding="utf-8")
    return summary


def _saved(source: str, out: Path, dtype: str, revision: str, classes: Sequence[str]) -> str:
    """Fill the directory `out` with the model, by its kind; returns what was done."""
    config = config_of(source, revision)
    how: dict[str, Any] = {"dtype": dtype, "revision": revision, "classes": classes}
    if is_image_model(config, classes):
        return save_image_classifier(source, out, **how)
    return save_text_model(source, out, kind=kind_of(config, classes), **how)


def check_class_names(classes: Sequence[str]) -> None:
    """Raise `InputError` for one name alone, a name twice, or one that is not a line of text."""
    for name in classes:
        try:
            one_line(name)
        except ValueError as error:
            raise InputError(f"--class {name!r}: {error}") from None
    if classes and len(set(classes)) < max(2, len(classes)):
        raise InputError(f"the classes are named {', '.join(classes[:10])}: expected two or more, each once")


def config_of(source: str, revision: str) -> Any:
    """transformers' configuration of the model; None where there is none that it knows: loading the model says why.
    Raises `InputError` for values that no configuration has."""
    from transformers import AutoConfig, PretrainedConfig

    try:
        check_layers(PretrainedConfig.get_config_dict(source, revision=revision)[0], f"the config.json of {source}")
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except InputError:
        raise
    except (OSError, ValueError, KeyError):
        return None
    except Exception as error:  # whatever its values lead to in transformers
        raise InputError(f"the config.json of {source} cannot be used: {named_line(error)}") from None


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
        help="a classifier of texts or images for these classes, in this order; its head is new where the source has "
        "none or others",
    )
    add_log_options(parser)
    arguments = parse_arguments(parser)
    adapter = arguments.export_adapter or arguments.import_adapter
    if (adapter is None) != (arguments.base is None):
        parser.error("--export-adapter or --import-adapter, and --base belong together")
    changed = changed_options(parser, arguments)
    if adapter is not None:
        refuse_unused(changed, ("dtype", "revision", "classes"), "with an adapter")
    if arguments.export_adapter is None:
        refuse_unused(changed, ("merged",), "without --export-adapter")
    if arguments.import_adapter is not None:
        print(import_adapter(adapter, base=real_path(arguments.base), out=real_path(arguments.out)))
        return 0
    if arguments.export_adapter is not None:
        base, out = real_path(arguments.base), real_path(arguments.out)
        print(export_adapter(arguments.export_adapter, base=base, out=out, merged=arguments.merged))
        return 0
    out, classes = real_path(arguments.out), arguments.classes
    print(convert_model(arguments.source, out, dtype=arguments.dtype, revision=arguments.revision, classes=classes))
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
