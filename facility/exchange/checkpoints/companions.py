"""The files beside a checkpoint's tensors: configuration, tokenizer, generation settings, a report."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Container
from pathlib import Path

from facility.exchange.checkpoints.model_files import read_model_file
from facility.exchange.errors import InputError
from facility.exchange.files.bounded import real_path
from facility.exchange.files.links import copy_tree

EXECUTABLE = (
    ".bin",
    ".pt",
    ".pth",
    ".pkl",
    ".pickle",
    ".ckpt",
    ".joblib",
    ".npy",
    ".npz",
    ".h5",
    ".msgpack",
    ".py",
    ".so",
)
"""Suffixes of files whose usual readers execute or unpickle what they hold."""
TENSORS = (".safetensors",)
SOURCE = "source.json"
"""What `coordinator.model` made an initial model from, which may be a path of the coordinator's machine."""
OWN = ("manifest.json", "manifest.json.sig", SOURCE)
"""Files that describe one directory only and are never copied."""
MOMENTS = ("second_moments", "moments")
FOLDERS = (*MOMENTS, "mean_walk")
"""Folders that belong to a checkpoint (modules of these names in `facility.exchange.checkpoints`)."""
NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's chat templates that have a name, for instance that of conversations with tools."""
OF_A_ROUND = ("round.json", "report.json", *FOLDERS)
"""Files and folders that describe one round."""


def refuse_links_elsewhere(folder: Path, *, but: tuple[str, ...] = ()) -> None:
    """Raise `InputError` for a link, in whatever folder, that leads out of this download: its target would be sent on.

    In Hugging Face's cache a model's files are links into `blobs`, two folders above. `but`: ends of names of files
    that may be elsewhere.
    """
    place = real_path(folder)
    ours = (place, place.parents[1] / "blobs") if len(place.parents) > 1 else (place,)
    for above, folders, files in os.walk(folder):
        for path in (Path(above) / name for name in (*folders, *files)):
            target = real_path(path)
            elsewhere = path.is_symlink() and not any(target.is_relative_to(one) for one in ours)
            if elsewhere and not (target.is_file() and target.name.endswith(but or ("/",))):
                raise InputError(f"{path} is a link to {target}, outside of {folder}; expected the files themselves")


def copy_companions(source: Path, target: Path, *, leave: Container[str] = OF_A_ROUND) -> None:
    """Copy every regular file of `source` that holds neither tensors, index, manifest nor code, but the names `leave`.

    Folders that belong to a checkpoint are copied with their files, a tokenizer's named chat templates as they are.
    """
    for path in sorted(Path(source).iterdir()):
        kept = path.suffix.lower() not in (*TENSORS, *EXECUTABLE) and not path.name.endswith(".index.json")
        if path.is_file() and kept and path.name not in OWN and path.name not in leave:
            shutil.copyfile(path, target / path.name)
    for name in FOLDERS:
        if name not in leave and (Path(source) / name).is_dir() and not (Path(source) / name).is_symlink():
            copy_tree(Path(source) / name, Path(target) / name, symlinks=True)
    copy_named_templates(Path(source), Path(target))


def copy_named_templates(source: Path, target: Path) -> None:
    """Copy a tokenizer's chat templates that have names, where it has such; `target` is there."""
    if named := [path for path in sorted((source / NAMED_TEMPLATES).glob("*.jinja")) if path.is_file()]:
        (target / NAMED_TEMPLATES).mkdir(exist_ok=True)
        for path in named:
            shutil.copyfile(path, target / NAMED_TEMPLATES / path.name)


def state_dtype(directory: Path, dtype: str) -> None:
    """State in `config.json` the dtype (torch's name) that the tensors are stored in: transformers loads them in what
    stands there. Nothing for a directory without one, of adapters alone."""
    file = directory / "config.json"
    if not file.is_file():
        return
    config = read_model_file(directory)
    config["dtype"] = dtype
    config.pop("torch_dtype", None)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
