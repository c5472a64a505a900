"""Write the table of `rule: auto` (coordinator/config/automatic.json) from what `federated_quality.py` measured.

    python tests/bench/federated_quality_choose.py

Reads `federated_quality.jsonl` beside this file (a copy of the benchmark's results.jsonl) and the rows of earlier runs
in `federated_quality_earlier.json` (0.16 M parameters). Compared are federations of one size of model, inner optimizer
and learning rate that differ in server optimizer and optimizer state alone; means over seeds of the perplexity over
that of pooled training with the same seed and tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from coordinator.config.automatic import TABLE
from tests.bench.quality_sizes import size_of
from tests.bench.quality_texts import DEALT, experiment_of

HERE = Path(__file__).resolve().parent
RESULTS, EARLIER = HERE / "federated_quality.jsonl", HERE / "federated_quality_earlier.json"
SEEDS = {64: 3, 384: 1}
"""Widths of the models that have rows, and with how many seeds the plain mean must have been measured."""
SEEDS_OF_OTHERS = 1
"""The same with another inner optimizer than AdamW, or with adapters."""
SHARING = ("adamw", "muon")
"""Inner optimizers whose second moments `auto` shares, over whole models."""
RATES = {"adafactor": 3e-2, "muon": 1.6e-2}
"""Learning rate of an inner optimizer, where it is not the size's: Muon's is the best one of pooled training."""
ADAPTERS, ADAPTERS_RATE = {"rank": 8}, 1e-2
"""Those that have rows, and their learning rate."""
LOCAL = {"learning_rate", "optimizer", "optimizer_parameters", "optimizer_state", "warmup_steps", "betas"}
"""What may differ from the benchmark's defaults in a federation that `auto` could choose: nothing that travels in a
model's bytes, as first moments do."""
BETA1, BETA2 = 0.9, 0.95
"""AdamW's, unless an arm says otherwise."""

Kind = tuple[str, bool]
"""Inner optimizer, and whether adapters are trained."""
Federation = tuple[str, str, int, Kind]
"""Experiment, schedule, width of the model and what trains it."""
Way = tuple[str, str, str]
"""Aggregation settings as JSON, optimizer state, and settings of training that are not the defaults, as JSON."""
Run = tuple[str, int]
"""Experiment and seed."""
Situation = tuple[int, int, int, bool, int, Kind]
"""Facilities, rounds, steps a round, whether the model was trained before, its width and what trains it."""
PLAIN: Kind = ("adamw", False)
Found = dict[Federation, dict[Way, dict[int, float]]]
"""Perplexity over pooled, by seed."""


def measured(results: Iterable[dict[str, Any]], earlier: Iterable[dict[str, Any]]) -> Found:
    """Every comparable federation; rows of the results replace earlier ones of the same seed."""
    found: Found = defaultdict(lambda: defaultdict(dict))
    for row in earlier:
        where = row["experiment"], row["schedule"], min(SEEDS), PLAIN
        _add(found, where, row, dict(enumerate(row["over_pooled"], start=1)))
    rows = [row for row in results if _comparable(row["key"])]
    pooled: dict[tuple[Any, ...], float] = {}
    for row in rows:  # of pooled training with other parameters of its optimizer the best counts
        if row["key"]["arm"]["aggregation"] is None and "betas" not in row["key"]["arm"]["local"]:
            place = _place(row["key"])
            pooled[place] = min(row["geometric_mean"], pooled.get(place, math.inf))
    for row in rows:
        key = row["key"]
        against = pooled.get(_place(key))
        if key["arm"]["aggregation"] is not None and against is not None:
            over = {key["seed"]: row["geometric_mean"] / against}
            where = key["experiment"], key["schedule"], key["width"], _kind(key["arm"])
            _add(found, where, key["arm"], over)
    return found


def _comparable(key: dict[str, Any]) -> bool:
    """Whether nothing differs that `auto` does not look at."""
    arm = key["arm"]
    other = {"codec", "unlike", "incomplete", "kind"} & set(arm)
    alike = key["experiment"].startswith(DEALT)
    return not (other or alike) and arm.get("lora", ADAPTERS) == ADAPTERS and key["width"] in SEEDS


def _kind(arm: dict[str, Any]) -> Kind:
    return arm["local"].get("optimizer", "adamw"), "lora" in arm


def _rate(kind: Kind, width: int) -> float:
    """Learning rate at which federations of a kind are compared."""
    optimizer, adapters = kind
    return ADAPTERS_RATE if adapters else RATES.get(optimizer, size_of(width).rate)


def _place(key: dict[str, Any]) -> tuple[Any, ...]:
    """Pooled training and the federations to compare with it have the same."""
    schedule, arm = key["schedule"], key["arm"]
    rounds, _, steps = schedule.partition("x")
    total = f"{int(rounds) * int(steps)} steps" if steps else schedule
    return key["experiment"], total, key["seed"], key["width"], _kind(arm), arm["local"].get("learning_rate")


def _add(found: Found, where: Federation, arm: dict[str, Any], over: dict[int, float]) -> None:
    local, (_, _, width, kind) = arm["local"], where
    shared = local.get("optimizer_state") == "shared"
    if shared and (kind[1] or kind[0] not in SHARING):
        return
    if set(local) <= LOCAL and local.get("learning_rate") == _rate(kind, width):
        beta1, beta2 = local.get("betas", (BETA1, BETA2))
        if beta1 != BETA1:
            return
        training: dict[str, Any] = {} if beta2 == BETA2 else {"beta2": beta2}
        if own := local.get("optimizer_parameters"):
            training["optimizer_parameters"] = own
        way = (
            json.dumps(arm["aggregation"], sort_keys=True),
            local.get("optimizer_state", "personal"),
            json.dumps(training, sort_keys=True),
        )
        found[where][way] |= over


def by_situation(found: Found) -> dict[Situation, dict[Way, dict[Run, float]]]:
    """Federations over other languages that are alike in all that `auto` looks at count together."""
    joined: dict[Situation, dict[Way, dict[Run, float]]] = defaultdict(lambda: defaultdict(dict))
    for (experiment, schedule, width, kind), ways in found.items():
        which = experiment_of(experiment)
        rounds, steps = map(int, schedule.split("x"))
        situation = len(which.languages), rounds, steps, bool(which.base), width, kind
        for way, over in ways.items():
            joined[situation][way] |= {(experiment, seed): value for seed, value in over.items()}
    return joined


def mean_of(runs: dict[Run, float]) -> float:
    """Over languages, each of which counts the same, of the means over seeds."""
    languages: dict[str, list[float]] = defaultdict(list)
    for (experiment, _), over in runs.items():
        languages[experiment].append(over)
    return statistics.mean(map(statistics.mean, languages.values()))


def row_of(situation: Situation, ways: dict[Way, dict[Run, float]]) -> dict[str, Any] | None:
    """The table's row; None where the plain mean was measured with too few seeds.

    No choice is worse than the plain mean, and none was measured in fewer runs than another of its optimizer state.
    """
    mean = json.dumps({"rule": "mean"})
    *federation, width, kind = situation
    enough = SEEDS[width] if kind == PLAIN else SEEDS_OF_OTHERS
    plains = [
        mean_of(runs)
        for (aggregation, state, _), runs in ways.items()
        if aggregation == mean and state == "personal" and len(runs) >= enough
    ]
    if not plains:
        return None
    plain = min(plains)
    best: dict[str, Any] = {}
    for way, over in sorted(((way, mean_of(runs)) for way, runs in ways.items()), key=lambda pair: pair[1]):
        (aggregation, state, training), runs = way, ways[way]
        most = max(len(others) for (_, other, _), others in ways.items() if other == state)
        if over <= plain and state not in best and len(runs) == most:
            best[state] = {"aggregation": json.loads(aggregation), "over_pooled": round(over, 4), "seeds": len(runs)}
            best[state] |= {"training": json.loads(training)} if training != "{}" else {}
    names = ("facilities", "rounds", "steps", "pretrained")
    where: dict[str, Any] = dict(zip(names, federation, strict=True)) | {"parameters": size_of(width).parameters}
    where |= {"optimizer": kind[0], "adapters": kind[1]} if kind != PLAIN else {}
    return {"situation": where, "mean": round(plain, 4), "best": best}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"default {RESULTS.name} beside this file")
    parser.add_argument("--earlier", type=Path, default=EARLIER, help=f"default {EARLIER.name} beside this file")
    parser.add_argument("--table", type=Path, default=TABLE, help="file to write (default: the table of `auto`)")
    options = parser.parse_args()
    results = [json.loads(line) for line in options.results.read_text().splitlines()]
    found = measured(results, json.loads(options.earlier.read_text())["rows"])
    joined = by_situation(found)
    rows = [row for situation in sorted(joined) if (row := row_of(situation, joined[situation])) is not None]
    source = "written by tests/bench/federated_quality_choose.py"
    options.table.write_text(json.dumps({"source": source, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())
