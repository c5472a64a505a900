"""The model card: huggingface_hub's ModelCard with EvalResults, from the report's data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from coordinator.archive.averaged import MEAN
from coordinator.comparison.matrix import title_of_mean
from coordinator.config.federation import Federation
from coordinator.durations import format_duration
from coordinator.publishing.names import address, public_names
from coordinator.report.markdown import table
from coordinator.report.page import cell, number
from facility.exchange.messages.evaluation import VALIDATION
from facility.exchange.sizes import format_bytes
from facility.exchange.task_words import words_of
from facility.exchange.text import number_of

SEEN = "Updates were sent as model weights to the coordinator, which can see each of them"
LICENSES = frozenset(
    "afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0 "
    "bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 "
    "cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 "
    "cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 "
    "cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 "
    "etalab-2.0 eupl-1.1 eupl-1.2 gemma gfdl gpl gpl-2.0 gpl-3.0 isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 "
    "llama3.1 llama3.2 llama3.3 llama4 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openrail openrail++ "
    "osl-3.0 other pddl postgresql unknown unlicense wtfpl zlib".split()
)
"""Identifiers of https://huggingface.co/docs/hub/repositories-licenses: the Hub refuses a card with another one."""
LONGEST_LICENSE = 60
"""Characters of a licence's name in the front matter."""
NO_GUARANTEE = "no differential privacy was applied, so that a published model may reproduce what it was trained on."


def model_card(
    federation: Federation,
    data: Mapping[str, Any],
    files: Mapping[str, str],
    unpublished: Mapping[str, str],
    notes: Sequence[str],
) -> ModelCard:
    """The published model's card; `data` is the report's, `files` has the SHA-256 of the files beside it,
    `unpublished` of files of tensors that the federation's records count to the model. `notes`: lines on its use."""
    names = public_names(federation, data["facilities"])
    title = federation.title or federation.name
    languages = sorted({language for one in federation.facilities for language in one.public.languages})
    card = ModelCardData(
        model_name=title,
        base_model=federation.base_model or None,
        language=languages or None,
        **license_of(federation.license),
        library_name="peft" if federation.training.lora.rank else "transformers",
        pipeline_tag=_task_type(data),
        tags=["federated-learning", "crossfed"],
        eval_results=evaluations(data, names) or None,
    )
    digests = [*notes, *_digests(files), *_recorded(data, unpublished)]
    return ModelCard(f"---\n{card.to_yaml()}\n---\n\n{_text(federation, data, names, title, digests)}")


def license_of(text: str) -> dict[str, Any]:
    """Front matter of a licence: the Hub takes identifiers of its own list in small letters, or `other` with a name."""
    if not text or text.lower() in LICENSES:
        return {"license": text.lower()} if text else {}
    web = text.startswith(("https://", "http://"))
    plain = re.sub(r"[^a-z0-9.]+", "-", text.lower().split("://")[-1]).strip("-.")[:LONGEST_LICENSE]
    spdx = re.fullmatch(r"[A-Za-z0-9.+-]+", text)
    link = address(text) if web else f"https://spdx.org/licenses/{text}" if spdx else ""
    return {"license": "other", "license_name": plain or "see-link"} | ({"license_link": link} if link else {})


def evaluations(data: Mapping[str, Any], names: Mapping[str, str]) -> list[EvalResult]:
    """Perplexity or loss of the published model on each facility's validation data, and its scores on tasks.

    `dataset_config` names the facility that evaluated: otherwise results would be taken for figures of one data set.
    """
    words = words_of(data.get("task", ""))
    found = [
        EvalResult(
            task_type=_task_type(data),
            dataset_type="private",
            dataset_config=(where := names.get(row["facility"], "a facility")),
            dataset_name=f"validation data of {where}",
            metric_type=words.metric,
            metric_value=round(value, 4),
        )
        for row in _received(data)
        if row["status"] == "ok" and (value := words.figure(row["perplexity_received"])) is not None
    ]
    after = data["model_round"] + 1
    return found + [
        EvalResult(
            task_type=_task_type(data),
            dataset_type="private" if one["task"] == VALIDATION else one["task"],
            dataset_config=(where := names.get(one["facility"], one["facility"])),
            dataset_name=f"validation data of {where}" if one["task"] == VALIDATION else one["task"],
            metric_type=one["metric"],
            metric_value=one["value"],
        )
        for one in data["tasks"]
        if one["round"] == after and not data["averaged"]  # those are of the global model
    ]


def _received(data: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What the facilities found of the published model as they received it."""
    if data["averaged"]:
        return [
            {"facility": one["facility"], "status": "ok", "perplexity_received": one["perplexity"]}
            for one in data["matrix"]["cells"]
            if one["model"] == title_of_mean(len(data["averaged"])) and not one["held_out"]
        ]
    after = data["model_round"] + 1
    later = [entry["facilities"] for entry in data["rounds"] if entry["round"] == after]
    return later[0] if later else data["final_evaluation"]


def _task_type(data: Mapping[str, Any]) -> str:
    return words_of(data.get("task", "")).hub_task


def _text(
    federation: Federation, data: Mapping[str, Any], names: Mapping[str, str], title: str, digests: Sequence[str]
) -> str:
    head, words = data["headline"], words_of(data.get("task", ""))
    base = federation.base_model or "a model of the federation's own"
    results = evaluations(data, names)
    lines = [
        f"# {title}",
        "",
        f"Trained from {base} by the federation `{federation.name}` of "
        f"{number_of(len(names), 'facility', 'facilities')} with CrossFed: each "
        f"facility trained on data that it did not give away, and a coordinator aggregated the updates.",
        "",
        f"- facilities: {', '.join(names.values())}",
        f"- rounds: {head['rounds']}; {words.unit}: {words.count(head):,}; aggregation: {rule_of(data['similarity'])}",
        *_of_which_round(data),
        *digests,
        "",
        "## Evaluation",
        "",
        *_evaluation(results),
        *_matrix(data, names),
        "## Privacy",
        "",
        privacy(data),
        "",
        "## Cost",
        "",
        *_cost(data, names),
        "## People and money",
        "",
        *_people(federation),
        "## Making it again",
        "",
        "`reproduce.md` in the crate published with this model holds the commands, versions, seeds and digests.",
        "",
    ]
    return "\n".join(lines)


def _evaluation(results: Sequence[EvalResult]) -> list[str]:
    """A table of the facilities' figures, or that there are none."""
    if not results:
        return ["The facilities have not evaluated this model.", ""]
    return table(
        ["data", "evaluated at", "metric", "value"],
        [[one.dataset_name, one.dataset_config, one.metric_type, number(one.metric_value)] for one in results],
    )


def _matrix(data: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """Every model on every facility's data, where they were compared; facilities by their public names."""
    matrix = data["matrix"]
    if not matrix.get("method"):
        return []

    def public(text: str) -> str:
        for name in sorted(names, key=len, reverse=True):
            for form in (f"{name}'s update", f"{name} alone"):
                if text == form:
                    return form.replace(name, names[name], 1)
        return text

    rows = []
    for row in matrix["data"]:
        own = [one for one in matrix["cells"] if one["data"] == row]
        label = row if own[0]["held_out"] else names.get(row, "a facility")
        rows.append([label, *(cell(data, row, model) for model in matrix["models"])])
    return [
        "### Every model on every facility's data",
        "",
        *table([f"{words_of(data.get('task', '')).metric} on the data of", *map(public, matrix["models"])], rows),
        f"In brackets: {matrix['method']}.",
        "",
    ]


def privacy(data: Mapping[str, Any]) -> str:
    """What protects the data: masks, and the privacy budget where the report has one."""
    seen = f"Datasets never left their facilities. {_seen(data['masking'])}"
    return f"{seen}. {_budget(data)}" if data["privacy"] else f"{seen}; {NO_GUARANTEE}"


def _seen(masked: Mapping[str, Any]) -> str:
    """What the coordinator saw of updates."""
    if not masked:
        return SEEN
    rounds = number_of(masked["all_rounds"], "round")
    some = "" if masked["rounds"] == masked["all_rounds"] else f" in {masked['rounds']} of {rounds}"
    return (
        f"Updates were masked before they left{some} (secure aggregation): the coordinator learnt sums of "
        f"{masked['smallest_sum']} updates or more and no single one"
    )


def _budget(data: Mapping[str, Any]) -> str:
    """The budget that was spent, and on what it holds."""
    budget = data["privacy"]
    units = sorted({one["unit"] for one in budget["facilities"].values()})
    steps = max(one["steps"] for one in budget["facilities"].values())
    absent = len(data["facilities"]) - len(budget["facilities"])
    without = (
        f" {absent} of {len(data['facilities'])} facilities reported no budget: nothing is promised for their data."
        if absent
        else ""
    )
    if gaps := budget["without_budget"]:
        rounds = sorted({number for one in gaps.values() for number in one})
        without += (
            f" {len(gaps)} of them trained without a budget in some rounds (the first is round {rounds[0]}): "
            "nothing is promised for theirs."
        )
    first, last = budget["stated_first"], budget["stated"]
    until = "" if budget["final_counted"] else "up to the last round "
    changed = "" if first == last else f"; it was changed while training went on, to ε = {last:g}"
    return (
        f"Training was differentially private (DP-SGD, Poisson sampling, up to {steps:,} noised steps a facility): "
        f"ε = {budget['epsilon']:.3g}, δ = {budget['delta']:g} for adding or removing one {' or '.join(units)} of the "
        f"training data, the largest over the facilities, whose data are taken to be disjoint. The budget stated "
        f"before training was ε = {first:g}{changed}. Validation losses were noised as well: {until}"
        f"ε = {budget['epsilon_of_validation']:.3g} for one of the validation data.{without}"
    )


def _cost(data: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    rows = [
        [
            names.get(name, name),
            number(one["node_hours"]),
            number(one["gpu_hours"]),
            number(one["kwh"]) or "not measured",
            one["energy_source"],
            number(one["co2e_kg"]),
        ]
        for name, one in data["cost"]["facilities"].items()
    ]
    head = ["facility", "node-hours", "GPU-hours", "kWh", "measured by", "kg CO₂e"]
    total = data["headline"]
    return [
        *table(head, rows),
        f"From the first job to the last result: {format_duration(total['wall_seconds'])}; moved both ways: "
        f"{format_bytes(total['bytes'])}.",
        "",
    ]


def _people(federation: Federation) -> list[str]:
    people = [
        f"- {one.name}"
        + (f" ([{one.orcid}](https://orcid.org/{one.orcid}))" if one.orcid else "")
        + (f", {one.affiliation}" if one.affiliation else "")
        for one in federation.creators
    ]
    return [*(people or ["- not stated"]), *(f"- Funding: {one}" for one in federation.funding), ""]


def _of_which_round(data: Mapping[str, Any]) -> list[str]:
    """A line where this is not the model of the last round."""
    if mean := data["averaged"]:
        return [
            f"- this is the mean of the global models of rounds {mean[0]} to {mean[-1]}, whose loss on the facilities' "
            "validation data is lower than that of the last of them"
        ]
    number, last = data["model_round"], len(data["rounds"]) - 1
    which = f"after round {number}" if number >= 0 else "that the federation began with"
    return [f"- this is the model {which}, the best of the {last + 1} rounds"] if number < last else []


def rule_of(records: Sequence[Mapping[str, Any]]) -> str:
    """How updates were aggregated in the last round."""
    if not records:
        return "mean"
    rule, optimizer = records[-1]["rule"], records[-1]["server_optimizer"]
    return rule if optimizer in ("", "plain") else f"{rule} with server optimizer {optimizer}"


def _digests(files: Mapping[str, str]) -> list[str]:
    return [f"- SHA-256 of `{name}`: `{digest}`" for name, digest in files.items()]


def _recorded(data: Mapping[str, Any], unpublished: Mapping[str, str]) -> list[str]:
    """The digest of the model in the records, and how it follows from those of its files."""
    lines = [
        f"- in the federation's records, the crate and `reproduce.md` this model is `{model_digest(data)}`: the "
        "SHA-256 of one line a file of tensors (`.safetensors`), in the order of their names: SHA-256, two blanks, name"
    ]
    if unpublished:
        listed = ", ".join(f"`{name}` `{digest}`" for name, digest in unpublished.items())
        lines.append(f"- not published, but with a line of its own there: {listed}")
    return lines


def model_digest(data: Mapping[str, Any]) -> str:
    """Digest of the published model, as the archive's manifest has it."""
    return named_digests(data)[published_name(data)]


def published_name(data: Mapping[str, Any]) -> str:
    """What the report's artefacts call the published model."""
    return MEAN if data["averaged"] else model_name(data["model_round"])


def model_name(number: int) -> str:
    """What the report's artefacts call the model that a round made; -1: the initial one."""
    return f"global model after round {number}" if number >= 0 else "initial model"


def named_digests(data: Mapping[str, Any]) -> dict[str, str]:
    return {one["name"]: one["sha256"] for one in data["artefacts"]}
