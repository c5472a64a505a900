"""What the simulator makes of published qualitative results, side by side. Prints JSON (or a table with --table).

    python -m tests.bench.simulate_published [--cases DIR] [--table]

`--cases`: the published network cases (`worldwide.json` and others); rows that need them are left out where it is
absent. "Published" figures are those of the cited abstracts and schedules' papers; "elsewhere" marks an earlier
independent simulation of the same setting. Nothing here was measured on the authors' hardware.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.simulation.described import Queue, Scenario, Site
from coordinator.simulation.facilities import simulate_federation
from coordinator.simulation.pipelines.iteration import simulate_layout
from coordinator.simulation.pipelines.layout import Layout
from coordinator.simulation.replicas import ExchangeCosts, simulate_policy
from facility.exchange.messages.emulation import Emulation
from facility.exchange.messages.sync import SyncSettings
from tests.simulation.layouts import uniform
from tests.simulation.plain_steps import plain_steps

CASES = Path(__file__).resolve().parents[3] / "shared" / "facts" / "planning"
Row = dict[str, Any]


def row(work: str, what: str, published: str, found: float, agrees: bool | None) -> Row:
    return {"work": work, "what": what, "published": published, "simulated": round(found, 4), "agrees": agrees}


def schedules() -> list[Row]:
    """Bubbles of uniform pipelines: 8 stages, 32 micro-batches, backward twice a forward."""
    stages, micro_batches = 8, 32

    def bubble(schedule: str, virtual: int = 1) -> float:
        layout = uniform(stages, micro_batches, virtual_stages=virtual, schedule=schedule)
        return simulate_layout(layout).iteration_seconds / (3 * micro_batches) - 1

    plain = (stages - 1) / micro_batches
    rows = []
    for schedule, virtual, expected, work in (
        ("gpipe", 1, plain, "GPipe, arXiv 1811.06965"),
        ("1f1b", 1, plain, "PipeDream-Flush, arXiv 2104.04473"),
        ("interleaved_1f1b", 4, plain / 4, "Interleaving, arXiv 2104.04473"),
        ("interleaved_zero_bubble", 1, plain / 3, "Zero bubble ZB-H1, arXiv 2401.10241"),
    ):
        found = bubble(schedule, virtual)
        what = f"{schedule}, {virtual} chunks a device: bubble over ideal time"
        rows.append(row(work, what, f"{expected:.4f}", found, abs(found - expected) < 0.01 * expected))
    held = {
        schedule: max(simulate_layout(uniform(stages, 32, schedule=schedule)).in_flight_micro_batches.values())
        for schedule in ("gpipe", "1f1b")
    }
    ratio = held["gpipe"] / held["1f1b"]
    rows.append(
        row(
            "PipeDream-Flush, arXiv 2104.04473",
            "activations in flight, GPipe over 1F1B",
            "M / S = 4",
            ratio,
            ratio == 4,
        )
    )
    return rows


def sequential_versus_pipelined() -> list[Row]:
    """Sky Computing (arXiv 2202.11836) passes one batch through all devices; pipelining micro-batches gains more."""
    stages = 16
    one = simulate_layout(uniform(stages, 1)).iteration_seconds
    many = simulate_layout(uniform(stages, 64, forward=1 / 64, backward=2 / 64)).iteration_seconds
    what = "16 stages: one batch walking through, over 64 micro-batches pipelined"
    return [row("Sky Computing, arXiv 2202.11836", what, "10 to 50 (elsewhere)", one / many, one / many > 10)]


def policies() -> list[Row]:
    """SD-PIPE's emulated heterogeneity, 8 workers: updates per second over all-reduce."""
    costs = ExchangeCosts(parameter_bytes=102e6, bytes_per_second=5e9)
    rows = []
    cases = (
        ("no heterogeneity", Emulation(), {"partial_reduce": 1.08, "adpsgd_blocking": 1.08}),
        (
            "stall 0.1 s, p = 0.1",
            Emulation(probability=0.1, seconds=0.1),
            {"partial_reduce": 1.35, "adpsgd_blocking": 1.17},
        ),
        (
            "stall 0.2 s, p = 0.1",
            Emulation(probability=0.1, seconds=0.2),
            {"partial_reduce": 1.57, "adpsgd_blocking": 1.23},
        ),
        ("one worker 5x slower", Emulation(factors=(5.0,)), {"partial_reduce": 3.79, "adpsgd_blocking": 1.01}),
    )
    for name, emulation, expected in cases:
        step = plain_steps(emulation, 0.07, 0.14)
        base = simulate_policy(SyncSettings(), 8, step, steps=400, costs=costs).updates_per_second
        for policy, elsewhere in expected.items():
            settings = SyncSettings(policy=policy, bound=10, step="own", patience=0.0)  # type: ignore[arg-type]
            found = simulate_policy(settings, 8, step, steps=400, costs=costs).updates_per_second / base
            agrees = abs(found / elsewhere - 1) < 0.1
            rows.append(
                row(
                    "SDPipe, PVLDB 16(9)",
                    f"{policy} over all-reduce, {name}",
                    f"{elsewhere} (elsewhere)",
                    found,
                    agrees,
                )
            )
    step = plain_steps(Emulation(probability=0.1, seconds=0.2), 0.07, 0.14)
    base = simulate_policy(SyncSettings(), 8, step, steps=400, costs=costs).updates_per_second
    published = SyncSettings(policy="partial_reduce", step="own", patience=0.0)
    best = simulate_policy(published, 8, step, steps=400, costs=costs).updates_per_second
    rows.append(
        row(
            "Partial Reduce, SIGMOD 2021", "over all-reduce, stalls", "1.21 to 2", best / base, 1.21 <= best / base <= 2
        )
    )
    return rows


def placement(cases: Path) -> list[Row]:
    """DT-FM's worldwide case (arXiv 2206.01288): random ranks, the layout optimal for its cost, one region a stage."""
    file = cases / "worldwide.json"
    if not file.is_file():
        return []
    raw = json.loads(file.read_text())
    latency, bandwidth = np.array(raw["delay_ms"]) / 1e3, np.array(raw["bandwidth_gbit_per_s"]) * 1e9 / 8
    np.fill_diagonal(bandwidth, np.inf)
    stages = replicas = 8
    micro_batches = 61
    # Their 1.3 B model: 3 layers a stage; 13 and 40 ms a micro-batch forward and backward are assumed.
    shape = (stages, replicas)

    def layout(grid: np.ndarray) -> Layout:
        return Layout(
            grid=tuple(tuple(int(d) for d in line) for line in grid),
            schedule="gpipe",
            micro_batches=(micro_batches,) * replicas,
            forward_seconds=np.full(shape, 0.013),
            backward_seconds=np.full(shape, 0.040),
            cut_bytes=np.full(stages - 1, 0.4712e9 / 61.04),
            gradient_bytes=np.full(stages, 0.65e9),
            latency=latency,
            bandwidth=bandwidth,
            sync="sharded_ps",
        )

    regions = np.arange(64).reshape(8, 8)  # eight devices of a region follow one another
    random = np.random.default_rng(0)
    by_chance = float(
        np.median([simulate_layout(layout(random.permutation(64).reshape(8, 8))).iteration_seconds for _ in range(20)])
    )
    # Regions by number: Oregon, Virginia, Ohio, Tokyo, Seoul, London, Frankfurt, Ireland.
    path = [4, 3, 2, 7, 6, 5, 1, 0]
    one_region_a_stage = simulate_layout(layout(regions[path])).iteration_seconds
    one_device_a_region = simulate_layout(layout(regions.T.copy())).iteration_seconds
    work = "DT-FM, arXiv 2206.01288, worldwide"
    data_centre = dataclasses.replace(
        layout(regions), latency=np.zeros((64, 64)), bandwidth=np.where(np.eye(64) > 0, np.inf, 100e9 / 8)
    )
    near = simulate_layout(data_centre).iteration_seconds
    return [
        row(
            work,
            "random ranks over the best layout (seconds of an iteration)",
            "much slower; 2.8 (elsewhere)",
            by_chance / one_region_a_stage,
            by_chance > 1.5 * one_region_a_stage,
        ),
        row(
            work,
            "one region a stage over one device of every region a stage",
            "0.62 (elsewhere; their cost prefers the latter kind)",
            one_region_a_stage / one_device_a_region,
            one_region_a_stage < one_device_a_region,
        ),
        row(
            work,
            "the same over a data centre's network",
            "1.7 to 2.3 slower over 100x slower links, with four times the computing",
            one_region_a_stage / near,
            None,
        ),
    ]


def federations() -> list[Row]:
    """Four sites, rounds of 30 minutes, a queue delay of an hour with 15 % at each half."""
    rows = []
    queue = Queue(kind="chance", seconds=3600, probability=0.15, draws=2)
    base = 0.0
    for policy, quorum, elsewhere in (
        ("synchronous", 0, 1.0),
        ("quorum", 3, 1.28),
        ("quorum", 2, 1.44),
        ("asynchronous", 0, 1.69),
    ):
        site = Site(count=4, train_seconds=1800, train_spread=0.1, queue=queue)
        run = Scenario(rounds=4000, facilities=[site], policy=policy, quorum=quorum)  # type: ignore[arg-type]
        found = simulate_federation(run).updates_per_hour
        base = base or found
        what = f"{policy} {quorum or ''} over waiting for all: updates an hour".replace("  ", " ")
        rows.append(
            row(
                "four sites with queues",
                what,
                f"{elsewhere} (elsewhere)",
                found / base,
                abs(found / base / elsewhere - 1) < 0.05,
            )
        )
    return rows


def main() -> int:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--cases", type=Path, default=CASES, help=f"directory of network cases (default {CASES.name})")
    top.add_argument("--table", action="store_true", help="a table instead of JSON")
    options = top.parse_args()
    rows = [*schedules(), *sequential_versus_pipelined(), *policies(), *placement(options.cases), *federations()]
    if options.table:
        for item in rows:
            verdict = {True: "agrees", False: "differs", None: ""}[item["agrees"]]
            print(f"| {item['work']} | {item['what']} | {item['published']} | {item['simulated']:.3f} | {verdict} |")
    else:
        print(
            json.dumps(
                {
                    "rows": rows,
                    "agree": sum(r["agrees"] is True for r in rows),
                    "of": sum(r["agrees"] is not None for r in rows),
                },
                indent=2,
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
