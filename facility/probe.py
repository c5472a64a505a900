"""`python -m facility.probe`: report a facility's environment to `crossfed check` as one JSON object; changes nothing.

Does not import torch, so that it answers at once on a login node.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import facility
from facility.exchange.checkpoints.labels import classes_digest
from facility.exchange.errors import CrossFedError, exit_on_error
from facility.exchange.files import present
from facility.exchange.files.owners import not_ours, written_by_all
from facility.exchange.files.paths import resolve_path
from facility.exchange.hints import keys_of
from facility.exchange.logs import add_log_options
from facility.exchange.messages import manifest, report, settings
from facility.exchange.messages.privacy import Unit
from facility.installed import requirement_problems
from facility.quota import read_quotas

if TYPE_CHECKING:
    from facility.dataset import DatasetManifest, PreparedDataset

PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "datasets", "numpy")
OPTIONAL = ("bitsandbytes", "lm_eval")
"""Packages that only some settings need."""

HASHED_AT_ONCE, HASHING_SECONDS = 40_000_000_000, 60.0
"""Most bytes that are hashed while `crossfed check` waits for the answer (180 s), and for how long."""


def formats() -> dict[str, int]:
    """Version of every message that both sides read and write."""
    return {"manifest": manifest.FORMAT, "report": report.FORMAT, "settings": settings.FORMAT}


def packages(names: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Versions of installed packages; None for one that is not."""
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def dataset(path: Path) -> dict[str, Any]:
    """What a prepared dataset says of itself; `error` when it is none."""
    from facility.dataset import open_dataset

    if not os.path.isdir(path):
        return {"error": "missing"}
    try:
        prepared = open_dataset(path)
    except CrossFedError as error:
        return {"error": str(error)}
    manifest = prepared.manifest
    return {
        "task": manifest.task,
        "block_tokens": manifest.block_tokens,
        "vocabulary_size": manifest.vocabulary_size,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "chat_template_sha256": manifest.chat_template_sha256,
        "blocks": {name: split.blocks for name, split in manifest.splits.items()},
        "documents": documents(manifest),
        "classes": len(manifest.classes),
        **({"classes_sha256": classes_digest(manifest.classes)} if manifest.classes else {}),
        **({"hides_rests": True} if prepared.hides_rests else {}),
        **({"separate": True} if manifest.documents == "separate" else {}),
        "refused_units": refused_units(prepared),
    } | images(manifest)


def refused_units(prepared: PreparedDataset) -> dict[str, str]:
    """Why a dataset has no units of a kind that differential privacy could protect, by kind; those that it has are
    absent."""
    from facility.training.privacy.units import check_unit

    refused = {}
    for unit in get_args(Unit):
        try:
            check_unit(prepared, unit)
        except CrossFedError as error:
            refused[unit] = str(error)
    return refused


def base_model(path: Path) -> dict[str, Any]:
    """Size and digest of a base model; `sha256` is None where it was never hashed and is too large to be hashed now.

    `seconds`: how long hashing was tried, where that was too short. Files that were hashed meanwhile are remembered.
    """
    from facility.exchange.checkpoints.base_model import base_digest, remembered_digest, tensor_files

    try:
        size = sum(file.stat().st_size for file in tensor_files(path))
        digest = remembered_digest(path)
        if digest is None and size <= HASHED_AT_ONCE:
            digest = base_digest(path, until=time.monotonic() + HASHING_SECONDS)
    except TimeoutError:
        return {"bytes": size, "sha256": None, "seconds": HASHING_SECONDS}
    except (CrossFedError, OSError) as error:
        return {"error": str(error)}
    return {"bytes": size, "sha256": digest}


def images(manifest: DatasetManifest) -> dict[str, Any]:
    """What facilities with images must have alike; nothing for text."""
    if manifest.pixels is None:
        return {}
    return {
        "image_size": " x ".join(map(str, manifest.pixels.shape)),
        "image_processor_sha256": manifest.pixels.processor_sha256,
    }


def documents(manifest: DatasetManifest) -> dict[str, int]:
    """Documents or images that are trained on, by split; none where blocks hold parts of several."""
    from facility.dataset import IMAGES

    if manifest.documents == "joined" and manifest.task not in ("classification", IMAGES):
        return {}
    return {name: split.documents - split.dropped_documents for name, split in manifest.splits.items()}


def disk(path: Path, reserve: int) -> dict[str, Any]:
    """Free space at `path` or its nearest existing parent; allocates `reserve` bytes to detect a quota."""
    folder = path
    while not (present.exists(folder) or folder.is_symlink()) and folder != folder.parent:
        folder = folder.parent
    answer: dict[str, Any] = {
        "exists": present.is_dir(path),
        "writable": folder.is_dir() and os.access(folder, os.W_OK | os.X_OK),
        "free": shutil.disk_usage(folder if folder.exists() else "/").free,
    }
    if reason := not_ours(path):
        answer["shared"] = reason
    elif (above := written_by_all(path)) is not None:
        answer["above"] = str(above)
    answer["quotas"] = (
        [{"of": one.of, "free": one.free, "files_free": one.files_free} for one in read_quotas(folder)]
        if answer["writable"]
        else []
    )
    if answer["writable"] and reserve and reserve < answer["free"] and shutil.which("fallocate"):
        with tempfile.TemporaryFile(dir=folder) as file:  # without a name: a probe that is killed leaves no room taken
            result = subprocess.run(
                ["fallocate", "-l", str(reserve), f"/proc/self/fd/{file.fileno()}"],
                pass_fds=[file.fileno()],
                capture_output=True,
                text=True,
                errors="replace",
                env=os.environ | {"LC_ALL": "C"},  # its words are read
            )
        if result.returncode != 0 and "not supported" not in result.stderr:
            too_large = result.returncode == -signal.SIGXFSZ  # which leaves it nothing to say
            said = "ulimit -f allows no file so large" if too_large else f"fallocate ended with {result.returncode}"
            answer["refused"] = [said, *result.stderr.strip().splitlines()][-1]
    return answer


def missing(module: str) -> str:
    """Why `python -m MODULE` would not start; empty where the module is found."""
    try:
        return "" if importlib.util.find_spec(module) else f"No module named {module!r}"
    except Exception as error:  # whatever the packages around it do when they are imported
        return f"{type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m facility.probe", description=__doc__)
    parser.add_argument(
        "--dataset", required=True, metavar="PATH", help="prepared dataset; relative paths count from $CROSSFED_HOME"
    )
    parser.add_argument("--workdir", type=Path, required=True, metavar="DIR", help="where models and updates will go")
    parser.add_argument(
        "--reserve", type=int, default=0, metavar="BYTES", help="room that will be needed there (default 0)"
    )
    parser.add_argument("--base", metavar="PATH", help="also report the digest of this base model (training.lora.base)")
    parser.add_argument("--trainer", metavar="MODULE", help="also look whether this module can be found")
    add_log_options(parser)
    arguments = parser.parse_args()
    answer: dict[str, Any] = {
        "crossfed": facility.__version__,
        "python": platform.python_version(),
        "packages": packages(),
        "optional": packages(OPTIONAL),
        "unmet": requirement_problems(),
        "formats": formats(),
        "settings_keys": list(keys_of(settings.FacilitySettings)),
        "dataset": dataset(resolve_path(arguments.dataset)),
        "disk": disk(arguments.workdir, arguments.reserve),
    }
    if arguments.base:
        answer["base_model"] = base_model(Path(resolve_path(arguments.base)))
    if arguments.trainer:
        answer["trainer"] = missing(arguments.trainer)
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
