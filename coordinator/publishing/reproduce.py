"""`reproduce.md` and the federation.yml beside it: commands, versions, seeds and digests that give the same weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from coordinator.archive.averaged import FOLDER
from coordinator.archive.rewind import AGAIN
from coordinator.config.federation import Federation
from coordinator.config.yaml_lines import Lined
from coordinator.publishing.card import model_digest, named_digests
from coordinator.publishing.names import slug
from facility import __version__
from facility.exchange.text import number_of

KEPT = {
    "title": (),
    "license": (),
    "base_model": (),
    "pretrained": (),
    "rounds": ("deadline", "node_hours"),
    "groups": (),
    "seed": (),
    "minimum_facilities": (),
    "come_backs": (),
    "final_evaluation": (),
    "aggregation": ("allowed_signers",),
    "sending": ("signing_key", "valid_hours"),
    "claims": (),
    "stop": (),
    "privacy": ("peer_signers",),
    "trainer": (),
}
"""Keys of federation.yml that decide what the weights are, each without those that name keys of the people who ran it.
Datasets, deployments, evaluations, trackers and messages are not among them; what of `evaluation` makes the published
model is written anew."""

NOT_PORTABLE = ("signing_key", "tracker", "trace")
"""Keys of `training:` that name a person's key or what only those who ran it look at; no weight depends on them."""


def local_federation(federation: Federation, names: Mapping[str, str], data: Mapping[str, Any]) -> str:
    """The federation with every facility on one machine: model in `model/`, datasets in `datasets/NAME/`."""
    raw = Lined(federation.file).data
    kept = {key: _without(raw[key], left_out) for key, left_out in KEPT.items() if key in raw}
    if isinstance(aggregation := kept.get("aggregation"), dict) and isinstance(aggregation.get("weights"), dict):
        weights = {slug(names[name]): one for name, one in aggregation["weights"].items() if name in names}
        kept["aggregation"] = aggregation | {"weights": weights}
    ranks = {
        row["facility"]: row["ranks"]
        for entry in data["rounds"]
        for row in entry["facilities"]
        if row.get("ranks", 0) > 1
    }
    facilities = []
    for one in raw["facilities"]:
        training = _portable(one.get("training") or {})
        if one["name"] in ranks:
            training["ranks"] = ranks[one["name"]]
        name = slug(names[one["name"]])
        facilities.append(
            {"name": name, "dataset": f"../datasets/{name}"}
            | ({"training": training} if training else {})
            | ({"trainer": one["trainer"]} if one.get("trainer") else {})
        )
    if data["averaged"]:
        kept["evaluation"] = {"last_models": len(data["averaged"])}
    if not _is_last(federation, data):
        kept["keep_rounds"] = 0
    described = {"name": raw["name"], "model": "../model"} | kept
    described |= {"archive": "../archive", "workdir": "../work"}
    described |= {"training": _portable(raw["training"])} if raw.get("training") else {}
    return yaml.safe_dump(described | {"facilities": facilities}, sort_keys=False, allow_unicode=True)


def _is_last(federation: Federation, data: Mapping[str, Any]) -> bool:
    """Whether the published model is that of the last of all rounds: archives drop models of earlier ones."""
    return not data["averaged"] and data["model_round"] == federation.rounds - 1


def _portable(training: Mapping[str, Any]) -> dict[str, Any]:
    """A facility's settings of training without keys, trackers and paths of its machines: a base model by its name."""
    portable = {key: value for key, value in training.items() if key not in NOT_PORTABLE}
    if isinstance(lora := portable.get("lora"), dict) and lora.get("base"):
        portable["lora"] = lora | {"base": os.path.basename(str(lora["base"]).rstrip("/"))}
    if isinstance(layout := portable.get("layout"), dict):
        portable["layout"] = {key: value for key, value in layout.items() if key != "plan"}
    if isinstance(sync := portable.get("sync"), dict) and isinstance(slowed := sync.get("emulation"), dict):
        portable["sync"] = sync | {"emulation": {key: value for key, value in slowed.items() if key != "trace"}}
    if isinstance(preference := portable.get("preference"), dict):  # its reference is the initial model, as without it
        portable["preference"] = {key: value for key, value in preference.items() if key != "reference"}
    return portable


def _without(value: Any, left_out: Sequence[str]) -> Any:
    """A section without some of its keys."""
    return {key: one for key, one in value.items() if key not in left_out} if isinstance(value, dict) else value


def instructions(federation: Federation, names: Mapping[str, str], data: Mapping[str, Any]) -> str:
    """Text of reproduce.md. Its commands run as written in the folder of the crate."""
    artefacts = named_digests(data)
    initial = artefacts.get("initial model", "")
    done = len(data["rounds"])
    versions = data["versions"]
    differs = unrepeatable(federation, names, data)
    lines = [
        f"# Making {federation.title or federation.name} again",
        "",
        f"The federation ran {number_of(done, 'round')} with seed {federation.seed}."
        + (f" The commands below run all {federation.rounds}." if done < federation.rounds else ""),
        *_promise(differs),
        "",
        "## What is needed",
        "",
        "- in `model/`: the initial model with its `manifest.json` (`crossfed model` writes one); `python -m "
        f"coordinator.publishing.digest model` prints `{initial}`"
        + (f" ({federation.base_model})" if federation.base_model else ""),
        *(
            f"- in `datasets/{slug(names[one.name])}/`: the prepared dataset of {names[one.name]}"
            + _digests(data, one.name)
            for one in federation.facilities
        ),
        *_bases(federation),
        "",
        "Datasets stay at their facilities: making the model again takes access to them, or the facilities' help.",
        "",
        *_about_names(names),
        "## Versions",
        "",
        *(
            f"- {names.get(name, name)}: {', '.join(f'{p} {v}' for p, v in of.items())}"
            for name, of in versions.items()
        ),
        "",
        "All packages are in `sbom.json`.",
        "",
        "## Commands",
        "",
        "```bash",
        f"crossfed --version    # {__version__}",
        "crossfed run --quiet --federation workflow/federation.yml",
        _last_command(data, compared=not differs),
        "```",
        "",
        "The last command prints the digest of the weights"
        + ("" if differs else " and fails where it differs from the published one")
        + f"; that of the published model is `{model_digest(data)}`. On other processors, or with another number of "
        "ranks, results agree up to rounding only.",
        "",
    ]
    return "\n".join(lines)


def _last_command(data: Mapping[str, Any], *, compared: bool) -> str:
    number = data["model_round"]
    place = f"archive/round-{number:04d}/model" if number >= 0 else "archive/initial/model"
    if data["averaged"]:
        place = f"archive/{FOLDER}/model"
    expected = f" --expect {model_digest(data)}" if compared else ""
    return f"python -m coordinator.publishing.digest {place}{expected}"


def _promise(differs: Sequence[str]) -> list[str]:
    """What the commands give."""
    same = "With the same initial model, datasets, versions and kind of processor, the commands below"
    if not differs:
        return [f"{same} give the same weights, bit for bit."]
    return [
        f"{same} run the same federation again, but not to the same bits, for they do not repeat this:",
        "",
        *(f"- {line}" for line in differs),
    ]


def unrepeatable(federation: Federation, names: Mapping[str, str], data: Mapping[str, Any]) -> list[str]:
    """What happened in the run that its settings alone do not bring about again, in sentences."""
    found = []
    for entry in data["rounds"]:
        out = [names.get(row["facility"], "a facility") for row in entry["facilities"] if row["status"] != "ok"]
        if out:
            found.append(f"round {entry['round']} was aggregated without {', '.join(out)}")
        late = [names.get(row["facility"], "a facility") for row in entry["facilities"] if row.get("staleness")]
        if late:
            found.append(f"in round {entry['round']} updates for earlier rounds were used, of {', '.join(late)}")
        lost = [names.get(row["facility"], "a facility") for row in entry["facilities"] if row.get("note")]
        if lost:
            found.append(f"in round {entry['round']} replicas were lost, at {', '.join(lost)}")
        again = [line for line in entry.get("changes", []) if line.startswith(AGAIN)]
        if again:
            found.append(f"round {entry['round']} was {again[0]}, after rounds that are not part of this")
        if len(entry.get("changes", [])) > len(again):
            found.append(f"federation.yml was changed before round {entry['round']} (`history.json` says how)")
        if entry.get("next_steps_reason", "").startswith("moved") and not entry.get("next_end"):
            found.append(f"from round {entry['round'] + 1} on facilities took numbers of steps that follow their speed")
        if entry.get("next_end"):
            found.append(f"in round {entry['round'] + 1} jobs took the steps that their queues left time for")
    if data["model_round"] < len(data["rounds"]) - 1:
        found.append("a deadline or a budget ended the run, and the best of its models was published")
    planned = [names[one.name] for one in federation.facilities if one.training.layout.plan]
    if planned:
        found.append(f"the ranks of {', '.join(planned)} followed a plan for devices of its own")
    slowed = [names[one.name] for one in federation.facilities if one.training.sync.emulation.trace]
    if slowed:
        found.append(f"replicas of {', '.join(slowed)} were slowed down by a trace of speeds")
    if federation.privacy is not None and federation.privacy.differential is not None:
        found.append("the noise of differential privacy comes from the operating system and is drawn anew")
    return found


def _digests(data: Mapping[str, Any], name: str) -> str:
    for entry in reversed(data["rounds"]):
        for row in entry["facilities"]:
            if row["facility"] == name and row.get("dataset"):
                digests = (f"{split}.npy `{one['sha256']}`" for split, one in row["dataset"]["splits"].items())
                return f" ({', '.join(digests)})"
    return ""


def _bases(federation: Federation) -> list[str]:
    """Base models that do not travel: where the trainer looks for them."""
    found = {os.path.basename(one.training.lora.base.rstrip("/")) for one in federation.facilities}
    return [
        f"- as `{name}` in the folder that `$CROSSFED_HOME` names: the base model of the adapters"
        for name in sorted(filter(None, found))
    ]


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
