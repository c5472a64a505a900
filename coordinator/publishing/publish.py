"""`crossfed publish --out DIR`: the final model and its card in DIR/model, a crate of its making in DIR/crate."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.config.federation import Federation, read_federation
from coordinator.publishing.card import model_card
from coordinator.publishing.crate import write_compact, write_crate
from coordinator.publishing.croissant import card
from coordinator.publishing.names import public_names, renamed, slug
from coordinator.publishing.reproduce import write_reproduction
from coordinator.publishing.sbom import bill_of_materials
from coordinator.report.make import data_of
from coordinator.report.page import page
from coordinator.report.redaction import published
from facility.exchange.checkpoints.companions import FOLDERS
from facility.exchange.errors import InputError
from facility.exchange.files.durable import new_directory, write_json, write_text
from facility.exchange.messages.manifest import read_manifest, verify_manifest

PRIVATE = ("versions", "devices", "reason")
"""Keys of a facility's row that an unnamed facility keeps to itself."""


def publish(file: Path, out: Path) -> Path:
    """Make `out`, which must not exist; returns it. Raises `InputError` where there is no finished model."""
    federation = read_federation(file)
    if out.exists():
        raise InputError(f"{out} exists already; remove it or choose another --out")
    data = data_of(federation)
    model = Path(data["model"]) if data["model"] else None
    if model is None or not data["rounds"] or not model.is_dir():
        raise InputError(f"there is no model to publish in {federation.archive_path}: no round is complete")
    verify_manifest(model)
    names = public_names(federation)
    shown = anonymous(data, names)
    with new_directory(out) as folder:
        shutil.copytree(model, folder / "model", ignore=shutil.ignore_patterns("manifest.json", *FOLDERS))
        model_card(federation, data, digests(model)).save(folder / "model" / "README.md")
        crate = folder / "crate"
        write_reproduction(crate, federation, names, shown | {"rounds": data["rounds"], "artefacts": data["artefacts"]})
        write_text(crate / "report.html", page(shown))
        write_json(crate / "settings.json", shown["settings"])
        write_compact(crate / "history.json", shown["rounds"])
        write_json(crate / "sbom.json", bill_of_materials(shown["versions"], federation.name))
        _cards(crate, federation, names, data)
        write_crate(crate, federation, names, data)
    return out


def digests(model: Path) -> dict[str, str]:
    """SHA-256 of the files with weights, as `sha256sum` prints it, by their names in the published folder."""
    files = read_manifest(model).files
    return {
        name: one.sha256
        for name, one in sorted(files.items())
        if name.endswith(".safetensors") and name.partition("/")[0] not in FOLDERS
    }


def anonymous(data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The report's data with published names, and without the reasons, devices and versions of unnamed facilities."""
    unnamed = {name for name, shown in names.items() if name != shown}
    copied = json.loads(json.dumps(data))
    copied.pop("model")
    for entry in [*copied["rounds"], {"facilities": copied["final_evaluation"]}]:
        for row in entry["facilities"]:
            if row["facility"] in unnamed:
                row.update({key: type(row[key])() for key in PRIVATE if key in row})
    for entry in copied["rounds"]:
        entry["changes"] = [_without_paths(line) for line in entry.get("changes", [])]
    copied["remarks"] = [_without_paths(line) for line in copied["remarks"]]
    for one in copied["failures"]:
        one["reason"] = "" if one["facility"] in unnamed or not one["facility"] else one["reason"]
    copied["versions"] = {who: packages for who, packages in copied["versions"].items() if who not in unnamed}
    named = {name: name == shown for name, shown in names.items()}
    result = _renamed(copied | {"settings": published(copied["settings"], named)}, names)
    return result | {"model": None, "stopped": data["stopped"] and "see the federation"}


def _without_paths(line: str) -> str:
    """A sentence with the last part only of each path in it."""
    return re.sub(r"(?<![\w.])[~.]{0,2}(/[^\s/,;:'\")]+)+", lambda path: f"…/{path[0].rsplit('/', 1)[1]}", line)


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {names.get(key, key): _renamed(one, names) for key, one in value.items()}
    if isinstance(value, list):
        return [_renamed(one, names) for one in value]
    return (
        renamed(value, {name: shown for name, shown in names.items() if name != shown})
        if isinstance(value, str)
        else value
    )


def _cards(crate: Path, federation: Federation, names: Mapping[str, str], data: Mapping[str, Any]) -> None:
    """A Croissant card of each facility that opts in and has reported its counts."""
    for one in federation.facilities:
        rows = [row for entry in data["rounds"] for row in entry["facilities"] if row["facility"] == one.name]
        datasets = [row["dataset"] for row in rows if row.get("dataset")]
        if one.public.dataset_card and datasets:
            (crate / "croissant").mkdir(exist_ok=True)
            shown = names[one.name]
            write_json(crate / "croissant" / f"{slug(shown)}.json", card(shown, datasets[-1], one.public))
