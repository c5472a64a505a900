"""`crossfed publish --out DIR`: the final model and its card in DIR/model, a crate of its making in DIR/crate."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from coordinator.archive.rounds import Archive
from coordinator.comparison.matrix import TITLES
from coordinator.config.evaluation import COORDINATOR
from coordinator.config.federation import Federation, read_federation
from coordinator.publishing.card import model_card, model_digest
from coordinator.publishing.crate import write_compact, write_crate
from coordinator.publishing.croissant import card
from coordinator.publishing.names import public_names, renamed, slug
from coordinator.publishing.reproduce import write_reproduction
from coordinator.publishing.sbom import bill_of_materials
from coordinator.report.data import THE_COORDINATOR, own_name_of
from coordinator.report.make import data_of
from coordinator.report.page import page
from coordinator.report.redaction import published_settings
from facility.exchange.checkpoints.adapter_twins import twins_in
from facility.exchange.checkpoints.adapters import CONFIG, PREFIX, class_in, loaded_as, read_adapter_config
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.companions import FOLDERS, OWN
from facility.exchange.errors import InputError
from facility.exchange.files.durable import new_directory, write_json, write_text
from facility.exchange.files.links import copy_tree
from facility.exchange.files.unwinding import unwound_by_signals
from facility.exchange.messages.manifest import read_manifest, sha256_of, verify_manifest

log = logging.getLogger("coordinator.publishing")

CARD = "README.md"
PRIVATE = ("versions", "devices", "reason", "note", "unasked")
"""Keys of a facility's row that an unnamed facility keeps to itself."""
TOLD = {"drift": "reason", "scores": "problem"}
"""Sections of a row, and what in them an unnamed facility says in its own words."""
CHANGE_OF_A_SITE = re.compile(
    r"((?:from round \d+ on: )?(?:facilities\[[^\]]*\]\.)?"
    r"(?:(?:deployment|dataset|evaluation|model|notify|submit_ahead|trackers|workdir)\b"
    r"|(?:\w+\.)+(?:base|plan|trace|reference|signing_key|allowed_signers|peer_signers)\b)[^:]*): .*"
)
"""A change of what is not published of anybody: its key, then its values."""
IN_ITS_OWN_WORDS = ("reason", "note", "problem", "uncorrected")
"""Keys of a report whose values are sentences of facilities, in which paths of theirs may stand."""


OUR_WORDS = (
    "format",
    "kind",
    "mode",
    "status",
    "task",
    "metric",
    "unit",
    "rule",
    "server_optimizer",
    "energy_source",
    "weights",
    "done",
)
"""Keys of a report whose values are words of our own, whatever facilities are called."""
OUR_KEYS = ("splits", "phases", "usage", "scores", "details", "settings", "training", "trainer", "evaluation")
"""Keys of mappings whose own keys are never names of facilities."""
OUR_TITLES = ("model", "models")


def publish(file: Path, out: Path) -> Path:
    """Make `out`, which must not exist; returns it. Raises `InputError` where there is no finished model."""
    federation = read_federation(file)
    if os.path.lexists(out):
        raise InputError(f"{out} exists already; remove it or choose another --out")
    data = data_of(federation)
    model = Path(data["model"]) if data["model"] else None
    if model is None or not data["rounds"] or not model.is_dir():
        raise InputError(f"there is no model to publish in {federation.archive_path}: no round is complete")
    if (found := verify_manifest(model).content_sha256) != model_digest(data):
        raise InputError(
            f"{model} holds weights of digest {found:.12}, the record of its round names {model_digest(data):.12}: "
            "they were exchanged since; put back those of the round"
        )
    names = public_names(federation, data["facilities"])
    shown = anonymous(data, names)
    with unwound_by_signals(), new_directory(out) as folder:
        copy_tree(model, folder / "model", leave=(*OWN, *FOLDERS))
        changed = name_the_base(folder / "model", federation.base_model)
        notes = loaded_otherwise(folder / "model")
        files = digests(model) | changed
        model_card(federation, data, files, unpublished_tensors(model), notes).save(folder / "model" / CARD)
        crate = folder / "crate"
        write_reproduction(crate, federation, names, shown | {"rounds": data["rounds"], "artefacts": data["artefacts"]})
        write_text(crate / "report.html", page(shown))
        write_json(crate / "settings.json", shown["settings"])
        write_compact(crate / "history.json", shown["rounds"])
        write_json(crate / "sbom.json", bill_of_materials(shown["versions"], federation.name, own_name_of(names)))
        _cards(crate, federation, names, data)
        write_crate(crate, federation, names, data)
    done, limited = len(data["rounds"]), Archive(federation.archive_path).read_note("limited")
    if done < federation.rounds and not limited:
        log.warning(
            "the federation is not at its end: this is the model after %d of %d rounds", done, federation.rounds
        )
    return out


def name_the_base(model: Path, base: str) -> dict[str, str]:
    """Let the configuration of adapters name the public `base`, and no path of the machine that they began on, and what
    peft loads it as, where that is not said; returns the new SHA-256 of that file by its name, {} where there are no
    adapters."""
    file = model / CONFIG
    if not file.is_file():
        return {}
    config = read_adapter_config(model)
    if not (config.get("task_type") or config.get("auto_mapping")):
        config |= loaded_as(class_in(model))
    write_json(file, config | {"base_model_name_or_path": base})
    return {CONFIG: sha256_of(file)}


def loaded_otherwise(model: Path) -> list[str]:
    """Lines of the card on weights that peft takes from the base, and with them another model than was trained."""
    twins = twins_in(open_checkpoint(model), model) if (model / CONFIG).is_file() else {}
    short = {other.removeprefix(PREFIX): held.removeprefix(PREFIX) for other, held in twins.items()}
    lines = [
        f"`{held}` was trained as one weight with `{other}`, which peft takes from the base: load what `python -m "
        "coordinator.model --export-adapter` writes of these files, or use that weight for both"
        for other, held in sorted(short.items())
    ]
    for line in lines:
        log.warning("the published adapter: %s", line)
    return [f"- {line}" for line in lines]


def digests(model: Path) -> dict[str, str]:
    """SHA-256 of the files beside the card, as `sha256sum` prints it, by their names in the published folder."""
    files = read_manifest(model).files
    left_out = (*OWN, *FOLDERS, CARD)
    return {name: one.sha256 for name, one in sorted(files.items()) if name.partition("/")[0] not in left_out}


def unpublished_tensors(model: Path) -> dict[str, str]:
    """SHA-256 of the files of tensors that stay behind: the model's own digest is made of them as well."""
    files, published = read_manifest(model).files, digests(model)
    return {n: one.sha256 for n, one in sorted(files.items()) if n.endswith(".safetensors") and n not in published}


def anonymous(data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The report's data with published names, and without the words, devices and versions of unnamed facilities."""
    copied = json.loads(json.dumps(data))
    copied.pop("model")
    _leave_out_private(copied, {name for name, shown in names.items() if name != shown})
    for one in copied["artefacts"]:
        one["path"] = ""  # the archive is not published, and a link into it would lead nowhere
    for entry in copied["rounds"]:
        entry["changes"] = [_publishable(line) for line in entry.get("changes", [])]
    copied["remarks"] = [_publishable(line) for line in copied["remarks"]]
    named = {name: name == shown for name, shown in names.items()}
    result = _renamed(copied | {"settings": published_settings(copied["settings"], named)}, names)
    return result | {"model": None, "stopped": data["stopped"] and "see the federation"}


def _leave_out_private(data: dict[str, Any], unnamed: Collection[str]) -> None:
    """Remove what unnamed facilities keep to themselves from the report's data."""
    for entry in [*data["rounds"], {"facilities": data["final_evaluation"]}]:
        for row in entry["facilities"]:
            if row["facility"] in unnamed:
                row.update({key: type(row[key])() for key in PRIVATE if key in row})
                for section, key in TOLD.items():
                    (row.get(section) or {}).pop(key, None)
    for one in data["failures"]:
        one["reason"] = "" if one["facility"] in unnamed or not one["facility"] else one["reason"]
    for name, one in data["drift"].items():
        one["uncorrected"] = "" if name in unnamed else one["uncorrected"]
    for name, one in data["matrix"].get("alone", {}).items():
        one["reason"] = "" if name in unnamed else one["reason"]
    gaps = data["matrix"].get("gaps", {})
    gaps.update({name: "not all models were evaluated there" for name in gaps if name in unnamed})
    data["versions"] = {name: packages for name, packages in data["versions"].items() if name not in unnamed}


def _publishable(line: str) -> str:
    """A sentence without the values of a change of a site's own settings, and with the last part only of each path."""
    return without_paths(CHANGE_OF_A_SITE.sub(r"\1 was changed", line))


def without_paths(text: str) -> str:
    """The text with the last part only of each path."""
    return re.sub(r"(?<![\w.])[~.]{0,2}(/[^\s/,;:'\")]+)+", lambda path: f"…/{path[0].rsplit('/', 1)[1]}", text)


def _renamed(value: Any, names: Mapping[str, str], key: str = "") -> Any:
    """`key`: that under which the value stands."""
    if key in OUR_WORDS and not isinstance(value, dict):  # a facility may be called `ok`, `train` or `rounds`
        return value
    if isinstance(value, dict):
        ours = key in OUR_KEYS or not value.keys() <= names.keys() | {COORDINATOR, THE_COORDINATOR}
        return {one if ours else names.get(one, one): _renamed(inner, names, one) for one, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(one, names, key) for one in value]
    if not isinstance(value, str) or (key in OUR_TITLES and value in TITLES.values()):
        return value
    return renamed(without_paths(value) if key in IN_ITS_OWN_WORDS else value, names)


def _cards(crate: Path, federation: Federation, names: Mapping[str, str], data: Mapping[str, Any]) -> None:
    """A Croissant card of each facility that opts in and has reported its counts."""
    for one in federation.facilities:
        rows = [row for entry in data["rounds"] for row in entry["facilities"] if row["facility"] == one.name]
        datasets = [row["dataset"] for row in rows if row.get("dataset")]
        if one.public.dataset_card and datasets:
            (crate / "croissant").mkdir(exist_ok=True)
            shown = names[one.name]
            write_json(crate / "croissant" / f"{slug(shown)}.json", card(shown, datasets[-1], one.public))
