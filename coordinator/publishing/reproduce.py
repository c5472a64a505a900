"""`reproduce.md` and the federation.yml beside it: commands, versions, seeds and digests that give the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from coordinator.config.federation import Federation
from facility import __version__

DROPPED = ("archive", "workdir", "notify", "facilities", "model", "creators", "funding", "training")
"""Keys of federation.yml that a reproduction sets itself or does not need."""


def local_federation(federation: Federation, names: Mapping[str, str], data: Mapping[str, Any]) -> str:
    """The federation with every facility on one machine: model in `model/`, datasets in `datasets/NAME/`."""
    raw = yaml.safe_load(federation.file.read_text())
    kept = {key: value for key, value in raw.items() if key not in DROPPED}
    ranks = {
        row["facility"]: row["ranks"]
        for entry in data["rounds"]
        for row in entry["facilities"]
        if row.get("ranks", 0) > 1
    }
    facilities = []
    for one in raw["facilities"]:
        training = dict(one.get("training") or {})
        if one["name"] in ranks:
            training["ranks"] = ranks[one["name"]]
        name = names[one["name"]].replace(" ", "-")
        facilities.append(
            {"name": name, "dataset": f"../datasets/{name}"} | ({"training": training} if training else {})
        )
    described = {"name": raw["name"], "model": "../model"} | {key: kept[key] for key in kept if key != "name"}
    described |= {"archive": "../archive", "workdir": "../work"}
    described |= {"training": raw["training"]} if raw.get("training") else {}
    return yaml.safe_dump(described | {"facilities": facilities}, sort_keys=False, allow_unicode=True)


def instructions(federation: Federation, names: Mapping[str, str], data: Mapping[str, Any]) -> str:
    """Text of reproduce.md. Its commands run as written in the folder of the crate."""
    artefacts = {one["name"]: one["sha256"] for one in data["artefacts"]}
    initial = artefacts.get("initial model", "")
    done = len(data["rounds"])
    final = artefacts.get(f"global model after round {done - 1}", "")
    versions = data["versions"]
    lines = [
        f"# Making {federation.title or federation.name} again",
        "",
        f"The federation ran {done} rounds with seed {federation.seed}. With the same initial model, datasets, "
        "versions and kind of processor, the commands below give the same weights, bit for bit.",
        "",
        "## What is needed",
        "",
        f"- in `model/`: the initial model, whose weights have SHA-256 `{initial}`"
        + (f" ({federation.base_model})" if federation.base_model else ""),
        *(
            f"- in `datasets/{names[one.name].replace(' ', '-')}/`: the prepared dataset of {names[one.name]}"
            + _digests(data, one.name)
            for one in federation.facilities
        ),
        "",
        "Datasets stay at their facilities: to reproduce this, have access to them, or asks the facilities to run "
        "their part.",
        "",
        *_about_names(names),
        "## Versions",
        "",
        *(f"- {names.get(who, who)}: {', '.join(f'{p} {v}' for p, v in of.items())}" for who, of in versions.items()),
        "",
        "All packages are in `sbom.json`.",
        "",
        "## Commands",
        "",
        "```bash",
        f"crossfed --version    # {__version__}",
        "crossfed run --quiet --federation workflow/federation.yml",
        f"python -m coordinator.publishing.digest archive/round-{done - 1:04d}/model --expect {final}",
        "```",
        "",
        "The last command prints the digest of the weights and fails where it differs from the published one. On other "
        "processors, or with another number of ranks, results agree up to rounding only.",
        "",
    ]
    return "\n".join(lines)


def _digests(data: Mapping[str, Any], name: str) -> str:
    for entry in reversed(data["rounds"]):
        for row in entry["facilities"]:
            if row["facility"] == name and row.get("dataset"):
                told = (f"{split}.npy `{one['sha256']}`" for split, one in row["dataset"]["splits"].items())
                return f" ({', '.join(told)})"
    return ""


def _about_names(names: Mapping[str, str]) -> list[str]:
    if all(name == shown for name, shown in names.items()):
        return []
    return [
        "Seeds depend on the facilities' names, and not all agreed to be named here: put their real names into "
        "`workflow/federation.yml` for the same weights.",
        "",
    ]


def write_reproduction(folder: Path, federation: Federation, names: Mapping[str, str], data: Mapping[str, Any]) -> None:
    """Write both files."""
    (folder / "workflow").mkdir(parents=True, exist_ok=True)
    (folder / "reproduce.md").write_text(instructions(federation, names, data), encoding="utf-8")
    (folder / "workflow" / "federation.yml").write_text(local_federation(federation, names, data), encoding="utf-8")
