"""Seconds that a facility waits between two trainings, for a large model, and what bounds them. Prints JSON.

    python tests/bench/between_trainings.py [--size 150m] [--facilities 4] [--parameters 8e9] [--gbit 10] [--turns 3]

The coordinator's own steps are measured here on --size parameters with as many updates: `check_update` of the last
one (its manifest and report, not its tensors), and `aggregate` of all with the server's state (mean+nesterov: float32
master and momentum), reading and verifying updates, model and state, and writing both. Reading and writing the same
bytes alone is measured beside it, turn about; of several turns the fastest of each counts, and the ratio of every turn
is told. Their seconds a byte give those of the large model, and `coordinator.simulation` what
a round of federation takes when all facilities end their training at the same time and share the coordinator's link.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from coordinator.aggregation.request import Request
from coordinator.aggregation.run import aggregate
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.verify import check_update
from coordinator.simulation.described import Scenario, Site
from coordinator.simulation.facilities import simulate_federation
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.step_norms import StepNorms
from facility.exchange.messages import report
from facility.exchange.messages.manifest import Manifest, read_manifest, write_manifest
from tests.bench.large_models import SHAPES, Shape, write_model
from tests.bench.perturbing_trainer import perturb

SETTINGS = AggregationSettings(rule="mean+nesterov", weights="equal")
TRAINING_SECONDS = 3600.0
PIECE = 16 << 20


def update_of(model: Path, number: int, round: int) -> Path:
    """An update of the model of `round` beside it."""
    out = model.with_name(f"update-{round}-{number}")
    out.mkdir()
    known = perturb(open_checkpoint(model), out, 100 * round + number)
    with StepNorms(open_checkpoint(model)) as norms:
        norms.read(open_checkpoint(out))
        norms.write(out)
    figures: dict[str, Any] = dict(
        loss_received=2.0, loss_returned=1.9, perplexity_received=7.4, perplexity_returned=6.7, training_loss=1.9
    )
    told = report.Report(
        federation="bench", facility=f"f{number}", round=round, samples=1, tokens=1, steps=1, **figures
    )
    report.write(out, told)
    manifest = Manifest(
        kind="update",
        federation="bench",
        facility=f"f{number}",
        round=round,
        base_sha256=read_manifest(model).content_sha256,
    )
    write_manifest(out, manifest, known)
    return out


def size_of(*folders: Path) -> int:
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*.safetensors"))


def plain_io(read: list[Path], written: int, scratch: Path) -> float:
    """Seconds to read these files and write so many bytes, by one thread, without looking at any."""
    buffer, began = bytearray(PIECE), time.perf_counter()
    for folder in read:
        for path in sorted(folder.rglob("*.safetensors")):
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    with open(scratch, "wb", buffering=0) as file:
        for _ in range(0, written, PIECE):
            file.write(buffer)
    seconds = time.perf_counter() - began
    scratch.unlink()
    return seconds


def measure(root: Path, shape: Shape, facilities: int, turns: int) -> list[dict[str, float]]:
    """Of each turn seconds a gigabyte of verifying an update, of aggregating (bytes read and written), and of plain
    reading and writing; the second round is measured, which has a state to begin from."""
    model = write_model(root / "model-0", shape)
    write_manifest(model, Manifest(kind="model", federation="bench", round=0))
    first = [update_of(model, facility, 0) for facility in range(facilities)]
    turn(root, "1", model, first, None)
    model, state = root / "model-1", root / "state-1"
    updates = [update_of(model, facility, 1) for facility in range(facilities)]
    found = []
    for _ in range(turns):
        found.append(turn(root, "2", model, updates, state))
        for name in ("model-2", "state-2"):
            shutil.rmtree(root / name)
    return found


def turn(root: Path, name: str, model: Path, updates: list[Path], state: Path | None) -> dict[str, float]:
    """Average once, to `model-NAME` and `state-NAME`, and read and write as much: seconds a gigabyte."""
    opened, told = open_checkpoint(model), read_manifest(model)
    began = time.perf_counter()
    check_update(updates[0], opened, told, "f0", told.round, content=False)
    verifying = (time.perf_counter() - began) / size_of(updates[0])
    out, state_out = root / f"model-{name}", root / f"state-{name}"
    began = time.perf_counter()
    aggregate(
        Request(
            base=model,
            updates=updates,
            out=out,
            settings=SETTINGS,
            state_in=state,
            state_out=state_out,
            verify_base=True,
            verify_updates=True,
        )
    )
    seconds = time.perf_counter() - began
    sources = [model, *updates, *([state] if state else [])]
    moved = size_of(*sources, out, state_out)
    alone = plain_io(sources, size_of(out, state_out), root / "scratch")
    return {"verify": 1e9 * verifying, "aggregate": 1e9 * seconds / moved, "plain_io": 1e9 * alone / moved}


def stated(rates: dict[str, float], parameters: float, facilities: int, gbit: float) -> dict[str, Any]:
    """A round of a model of so many parameters in half precision, all facilities ending at once."""
    model, state = 2 * parameters / 1e9, 8 * parameters / 1e9
    moved = (facilities + 2) * model + 2 * state
    verify, average = rates["verify"] * model, rates["aggregate"] * moved
    link = 1e3 * gbit / 8
    federation = Scenario(
        rounds=2,
        facilities=[Site(name="facility", count=facilities, train_seconds=TRAINING_SECONDS)],
        model_megabytes=1e3 * model,
        coordinator_megabytes_per_second=link,
        aggregate_seconds=verify + average,
    )
    round = simulate_federation(federation).round_seconds
    transfer = facilities * model / (link / 1e3)
    waits = round - TRAINING_SECONDS
    return {
        "model_gigabytes": round_to(model),
        "seconds_between_trainings": round_to(waits),
        "of_which": {
            "updates_on_the_link": round_to(transfer),
            "verifying_the_last_update": round_to(verify),
            "averaging_and_writing": round_to(average),
            "models_on_the_link": round_to(transfer),
        },
        "last_byte_in_to_first_byte_out": round_to(verify + average),
        "plain_reading_and_writing_of_what_is_averaged": round_to(rates["plain_io"] * moved),
        "over_plain_reading_and_writing": round_to((verify + average) / (rates["plain_io"] * moved)),
        "bound_by": "the link" if 2 * transfer > verify + average else "the coordinator's steps",
    }


def round_to(value: float) -> float:
    return float(f"{value:.3g}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="150m", help="what is measured on")
    parser.add_argument("--facilities", type=int, default=4)
    parser.add_argument("--parameters", type=float, default=SHAPES["8b"].parameters, help="what is stated for")
    parser.add_argument("--gbit", type=float, default=10.0, help="the coordinator's link, each direction")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="crossfed-between-") as folder:
        turns = measure(Path(folder), SHAPES[arguments.size], arguments.facilities, arguments.turns)
    rates = {name: min(one[name] for one in turns) for name in turns[0]}
    found = {
        "facilities": arguments.facilities,
        "parameters": arguments.parameters,
        "gbit_per_second": arguments.gbit,
        "seconds_a_gigabyte": {name: round_to(value) for name, value in rates.items()},
        "over_plain_by_turn": [round_to(one["aggregate"] / one["plain_io"]) for one in turns],
        **stated(rates, arguments.parameters, arguments.facilities, arguments.gbit),
    }
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
