"""Everything that a report shows, as JSON data gathered from the archive; the same for whole archives and half-way."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import re
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from coordinator.archive.averaged import MEAN, read_averaged
from coordinator.archive.journal import Entry, Journal
from coordinator.archive.privacy import privacy_summary
from coordinator.archive.remarks import summary_remarks
from coordinator.archive.rewind import rounds_set_aside
from coordinator.archive.rounds import CARRIED, Archive, RoundFile
from coordinator.archive.summary import summary_of
from coordinator.comparison.account import read_account
from coordinator.comparison.matrix import SHADES, matrix
from coordinator.config.evaluation import COORDINATOR
from coordinator.report.cost import by_facility, costs, with_waiting
from coordinator.report.drift import drift
from coordinator.report.predictions import predictions
from coordinator.report.timeline import Segment, segments, totals
from coordinator.shown_text import safe_line
from facility import __version__
from facility.exchange.messages.evaluation import ACCURACY, VALIDATION
from facility.exchange.messages.manifest import manifest_if_any
from facility.exchange.task_words import capitalise, words_of

FORMAT = 1
PACKAGES = ("streamflow", "cwltool", "torch", "transformers", "safetensors", "numpy")
VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+!~-]{0,59}")
"""Form of a package's name and version as facilities report them: other text is not copied into files."""
MODE = "rounds"
THE_COORDINATOR = "the coordinator"
"""What the coordinator is called where a facility has its name; no facility's name holds a blank."""

Row = dict[str, Any]


def gather(archive: Archive, *, federation: str, settings: Mapping[str, Any], carbon: float = 0.0) -> dict[str, Any]:
    """The report's data. `settings`: what the federation was asked to do; `carbon`: g CO2e per kWh, 0: unknown."""
    history, set_aside, entries = archive.history(), rounds_set_aside(archive), Journal(archive.path).read()
    rounds = summary_of(archive, history, set_aside, entries)
    names = _names(rounds, entries, settings)
    own_name = own_name_of(names)
    rows = [row for entry in rounds["rounds"] for row in entry["facilities"]]
    jobs = [*rows, *rounds["final_evaluation"]]
    found = segments(entries, {(row["round"], row["facility"]): row.get("phases", {}) for row in jobs})
    if not found:
        found = _estimated(rounds)
    account = read_account(archive) if archive.path.is_dir() else None
    compared = account.rows if account is not None else []
    aside = [dataclasses.asdict(row) for entry in set_aside for row in entry.facilities]
    every = [*aside, *jobs, *compared]
    data: dict[str, Any] = {
        "format": FORMAT,
        "federation": federation,
        "mode": MODE,
        "task": rounds["task"],
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "facilities": names,
        "rounds_wanted": settings.get("rounds", 0),
        "stopped": rounds["stopped"],
        "model": rounds["model"],
        "model_round": len(rounds["rounds"]) - 1 if rounds["best_round"] is None else rounds["best_round"],
        "averaged": rounds["averaged"],
        "rounds": rounds["rounds"],
        "final_evaluation": rounds["final_evaluation"],
        "curves": _curves(rounds, names),
        "matrix": matrix(archive, settings, names, words_of(rounds["task"])) or comparison(rounds, names),
        "tasks": _tasks([*rows, *rounds["final_evaluation"], *_own_scores(rounds, own_name)]),
        "training_losses": _training_losses(rounds, names),
        "timeline": {
            "observed": bool(entries),
            "segments": [_segment(one) for one in found],
            "totals": totals(found, names),
        },
        "traffic": _traffic(every, entries, names),
        "predictions": predictions(rows, names),
        "drift": drift(rows, names),
        "cost": with_waiting(costs(every, names, carbon), entries),
        "privacy": privacy_summary(rows, rounds["privacy_set_aside"], rounds["final_evaluation"]),
        "masking": rounds.get("masking", {}),
        "similarity": _similarity(history),
        "remarks": summary_remarks(rounds | {"aggregation": settings.get("chosen", "")}),
        "failures": [*_failures(rows, rounds, entries), *_left_out(jobs)],
        "settings": settings,
        "versions": _versions(rows, own_name),
        "artefacts": _artefacts(archive, history),
    }
    return data | {"headline": _headline(data, rows, found)}


def own_name_of(names: Collection[str]) -> str:
    """What the coordinator is called beside facilities of these names."""
    return THE_COORDINATOR if COORDINATOR in names else COORDINATOR


def _names(rounds: Mapping[str, Any], entries: Sequence[Entry], settings: Mapping[str, Any]) -> list[str]:
    listed = [one["name"] if isinstance(one, dict) else str(one) for one in settings.get("facilities", [])]
    seen = {row["facility"] for entry in rounds["rounds"] for row in entry["facilities"]}
    seen |= {entry.facility for entry in entries if entry.facility}
    return [*listed, *sorted(seen - set(listed))]


def _curves(rounds: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Perplexities: of the global model after each round, and by facility as received and as returned."""
    made = [rounds["initial_perplexity"], *(entry["global_perplexity"] for entry in rounds["rounds"])]
    curves: dict[str, Any] = {
        "global": [[number, value] for number, value in enumerate(made) if value is not None],
        "facilities": {},
    }
    rows = by_facility(row for entry in rounds["rounds"] for row in entry["facilities"])
    for name in names:
        own = rows.get(name, [])
        received = [[row["round"], row["perplexity_received"]] for row in own]
        received += [
            [len(rounds["rounds"]), row["perplexity_received"]]
            for row in rounds["final_evaluation"]
            if row["facility"] == name
        ]
        returned = [[row["round"] + 1, row["perplexity_returned"]] for row in own]
        curves["facilities"][name] = {
            "received": [pair for pair in received if pair[1] is not None],
            "returned": [pair for pair in returned if pair[1] is not None],
        }
    return curves


def _training_losses(rounds: Mapping[str, Any], names: Sequence[str]) -> dict[str, list[list[float]]]:
    """By facility: optimizer step, counted over all its rounds, and mean training loss up to it."""
    found: dict[str, list[list[float]]] = {}
    rows = by_facility(row for entry in rounds["rounds"] for row in entry["facilities"])
    for name in names:
        before = 0
        for row in rows.get(name, []):
            points = [[before + step, loss] for step, loss in row.get("training_losses", [])]
            found.setdefault(name, []).extend(points)
            before += row.get("steps") or 0
    return {name: points for name, points in found.items() if points}


def _own_scores(rounds: Mapping[str, Any], name: str) -> list[Row]:
    """What the coordinator itself found on tasks, as rows of a facility."""
    found = [(entry["round"], entry.get("scores", {})) for entry in rounds["rounds"]]
    found.append((len(rounds["rounds"]), rounds.get("final_scores", {})))
    return [{"round": number, "facility": name, "scores": scores} for number, scores in found if scores]


def _tasks(rows: Sequence[Row]) -> list[Row]:
    """Scores on tasks, by the round that received the evaluated model: round 0 received the initial one."""
    return [
        {"round": row["round"], "facility": row["facility"], **one}
        for row in rows
        for one in [*row.get("scores", {}).get("results", []), *_accuracy(row)]
    ]


def _accuracy(row: Row) -> list[Row]:
    """The accuracy on a facility's validation data of the model that it received, as a score."""
    value = row.get("accuracy_received")
    return [] if value is None else [{"task": VALIDATION, "metric": ACCURACY, "value": value, "stderr": None}]


def comparison(rounds: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Perplexity on each facility's validation data of the initial model, its own last update and the final model.

    Every figure is of that facility's own jobs: no update is shown to another facility.
    """
    cells = []
    rows = by_facility(row for entry in rounds["rounds"] for row in entry["facilities"])
    for name in names:
        own = rows.get(name, [])
        first = [row["perplexity_received"] for row in own if row["round"] == 0]
        last = [row["perplexity_returned"] for row in own if row["perplexity_returned"] is not None]
        final = [row["perplexity_received"] for row in rounds["final_evaluation"] if row["facility"] == name]
        perplexities = {"initial": first[0] if first else None, "own update": last[-1] if last else None}
        perplexities["final"] = final[0] if final else None
        cells += [{"data": name, "model": model, "perplexity": value} for model, value in perplexities.items() if value]
    models = [model for model in ("initial", "own update", "final") if any(one["model"] == model for one in cells)]
    data = [name for name in names if any(one["data"] == name for one in cells)]
    words = words_of(rounds["task"])
    caption = (
        f"{capitalise(words.metric)} on each facility's validation data (rows) of the initial model, the facility's "
        f"own last update and the final global model{SHADES}."
    )
    return {"data": data, "models": models, "cells": cells, "caption": caption} if len(models) > 1 else {}


def _segment(one: Segment) -> Row:
    begin, end = round(one.begin, 3), round(one.end, 3)
    return {"facility": one.facility, "kind": one.kind, "begin": begin, "end": end, "round": one.round}


def _estimated(rounds: Mapping[str, Any]) -> list[Segment]:
    """Where no events were recorded: each job as long as it says, up to the end of its round."""
    found = []
    for entry in rounds["rounds"]:
        end = datetime.fromisoformat(entry["finished"]).timestamp() if entry["finished"] else 0.0
        for row in entry["facilities"]:
            if end and row["seconds"]:
                begin = end - row["seconds"]
                one = Segment(facility=row["facility"], kind="train", begin=begin, end=end, round=row["round"])
                found.append(one)
    return found


def _traffic(rows: Sequence[Row], entries: Sequence[Entry], names: Sequence[str]) -> dict[str, Row]:
    """Bytes both ways by facility, of rounds and of what comes after the last; Mbit/s where transfers were timed."""
    moved: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for entry in entries:
        if entry.kind in ("sent", "transferred"):
            both = moved[entry.facility, entry.kind]
            both[0] += float(entry.detail.get("bytes", 0))
            both[1] += float(entry.detail.get("seconds", 0.0))
    result, by_name = {}, by_facility(rows)
    for name in names:
        own = by_name.get(name, [])
        result[name] = {
            # A round that is under way has events and no rows yet; a run without events has rows alone.
            "to_bytes": max(sum(row.get("sent_bytes", 0) for row in own), int(moved[name, "sent"][0])),
            "from_bytes": max(sum(row.get("received_bytes", 0) for row in own), int(moved[name, "transferred"][0])),
            "moments_bytes": sum(row.get("moments_bytes", 0) for row in own),
            "to_mbit_per_second": _speed(*moved[name, "sent"]),
            "from_mbit_per_second": _speed(*moved[name, "transferred"]),
        }
    return result


def _speed(size: float, seconds: float) -> float | None:
    return round(size * 8e-6 / seconds, 3) if seconds > 0 else None


def _similarity(history: Sequence[RoundFile]) -> list[Row]:
    """Per round: norms, cosines and weights of the updates, and what aggregation did about outliers."""
    result = []
    for entry in history:
        record = entry.aggregation
        parts = record.get("participants", [])
        result.append(
            {
                "round": entry.round,
                "rule": record.get("combiner") or record.get("rule", ""),
                "server_optimizer": record.get("outer", ""),
                "participants": [
                    {key: one.get(key) for key in ("facility", "weight", "norm", "cosine_to_mean", "cosines")}
                    for one in parts
                ],
                "quarantined": record.get("quarantined", {}),
                "suspects": record.get("suspects", {}),
                "dropped": record.get("dropped", {}),
                "step_norm": record.get("step_norm"),
            }
        )
    return result


def _failures(rows: Sequence[Row], rounds: Row, entries: Sequence[Entry]) -> list[Row]:
    """What went wrong, with the reason and what was done about it. `rounds`: the summary, `rows` all of its rounds."""
    attempts = {entry["round"]: entry["attempts"] for entry in rounds["rounds"]}
    found = []
    for row in rows:
        if row["status"] == "late" and row["reason"] == CARRIED:
            done = _used_later(row, rows)
            found.append(_failure(row["round"], row["facility"], "late", "not done when the round closed", done))
        elif row["status"] != "ok":
            times = attempts.get(row["round"], 1)
            done = "the round went on without it" + (f", after {times} attempts" if times > 1 else "")
            found.append(_failure(row["round"], row["facility"], row["status"], row["reason"], done))
        elif row.get("note"):
            rest = "the other replicas finished the round"
            found.append(_failure(row["round"], row["facility"], "replica lost", safe_line(row["note"]), rest))
    noted = {(one["round"], one["facility"]) for one in found}
    for row in rounds["final_evaluation"]:
        if row["status"] != "ok":
            noted.add((row["round"], row["facility"]))
            done = "the final model was not evaluated on its data"
            found.append(_failure("final", row["facility"], row["status"], row["reason"], done))
    for entry in entries:
        reason = safe_line(entry.detail.get("reason", entry.detail.get("text", "")))
        if entry.kind == "refused" and (entry.round, entry.facility) not in noted:
            again = "the round was asked for again, or is not complete"
            found.append(_failure(entry.round, entry.facility, "refused", reason, again))
        elif entry.kind == "login_refused":
            waited = "waited for the login; jobs and the other facilities went on"
            found.append(_failure(entry.round, entry.facility, "login", reason, waited))
        elif entry.kind == "stuck":
            said = f"{reason}: {safe_line(entry.detail.get('advice', ''))}"
            found.append(_failure(entry.round, entry.facility, "stuck", said, "reported"))
        elif entry.kind == "repeated":
            found.append(_failure(entry.round, "", "repeated", reason, "the round was asked for again"))
    return found


def _left_out(rows: Sequence[Row]) -> list[Row]:
    """Scores that facilities reported without being asked."""
    return [
        _failure(row["round"], row["facility"], "not asked for", safe_line(row["unasked"]), "left out")
        for row in rows
        if row.get("unasked")
    ]


def _used_later(row: Row, rows: Sequence[Row]) -> str:
    """What became of the update of a facility that was late."""
    for one in rows:
        if one["facility"] == row["facility"] and one["status"] == "ok":
            made = one["round"] - one.get("staleness", 0)
            if made <= row["round"] < one["round"]:
                return f"its update of round {made} was averaged in round {one['round']}"
    return "its update was not averaged, or not yet"


def _failure(number: int | str | None, facility: str, status: str, reason: str, done: str) -> Row:
    return {"round": number, "facility": facility, "status": status, "reason": reason, "done": done}


def _versions(rows: Sequence[Row], own_name: str) -> dict[str, dict[str, str]]:
    """Versions of packages at the coordinator and, from their latest reports, at the facilities."""
    here = {"crossfed": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            here[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {own_name: here} | {
        row["facility"]: {
            name: one for name, one in row["versions"].items() if all(map(VERSION.fullmatch, (name, one)))
        }
        for row in rows
        if row.get("versions")
    }


def _artefacts(archive: Archive, history: Sequence[RoundFile]) -> list[Row]:
    """Models and updates by digest. Those that were removed keep theirs in the records."""
    found = []
    initial = archive.path / "initial" / "model"
    if (manifest := manifest_if_any(initial)) is not None:
        found.append(_artefact("initial model", "initial/model", manifest.content_sha256))
    for entry in history:
        place = archive.round_directory(entry.round) / "model"
        digest = entry.model_sha256
        if not digest and (manifest := manifest_if_any(place)) is not None:
            digest = manifest.content_sha256
        kept = str(place.relative_to(archive.path)) if place.is_dir() else ""
        found.append(_artefact(f"global model after round {entry.round}", kept, digest))
        for row in entry.facilities:
            if row.update_sha256:
                found.append(_artefact(f"update of {row.facility}, round {entry.round}", "", row.update_sha256))
    if (mean := read_averaged(archive)) is not None:
        found.append(_artefact(MEAN, str(mean.model.relative_to(archive.path)), mean.sha256))
    return found


def _artefact(name: str, path: str, digest: str) -> Row:
    return {"name": name, "path": path, "sha256": digest}


def _headline(data: Mapping[str, Any], rows: Sequence[Row], found: Sequence[Segment]) -> dict[str, Any]:
    curve = [value for _, value in data["curves"]["global"]]
    return {
        "rounds": len(data["rounds"]),
        "facilities": len(data["facilities"]),
        "tokens": sum(row["tokens"] for row in rows),
        "samples": sum(row.get("samples", 0) for row in rows),
        "perplexity_first": curve[0] if curve else None,
        "perplexity_last": curve[-1] if len(curve) > 1 else None,
        "wall_seconds": round(max(one.end for one in found) - min(one.begin for one in found), 3) if found else 0.0,
        "lost_seconds": round(sum(one.seconds for one in found if one.kind == "lost"), 3),
        "bytes": sum(one["to_bytes"] + one["from_bytes"] for one in data["traffic"].values()),
        "failures": len(data["failures"]),
    } | data["cost"]["total"]
