"""Time to quality of every planning method, side by side in one run; JSON on stdout.

    python -m tests.bench.plan [--suite chain place joint] [--seconds 3] [--clock cpu]

chain  Sky Computing's 483 units on 16, 32 and 64 devices: even, dynamic, exact (given and free order).
place  DT-FM's five cases, then renumbered, disturbed, asymmetric and larger ones: ours, and the published search with
       ten times our seconds. Curves are (seconds, best cost).
joint  the five networks with unequal devices: DT-FM's layout, the best layer split on it, and joint planning; all
       simulated.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from coordinator.planning import stop as stopping
from coordinator.planning.chain import Chain, Infeasible
from coordinator.planning.dynamic import plan_dynamic
from coordinator.planning.even import plan_even
from coordinator.planning.exact.contiguous import plan_exact_in_order
from coordinator.planning.exact.free_order import plan_exact
from coordinator.planning.joint.plan import plan_joint
from coordinator.planning.placement.cost import costs_of, grid_cost
from coordinator.planning.placement.place import plan_place
from coordinator.planning.solve import placed
from coordinator.planning.stop import Stop
from coordinator.problem.chain import ChainProblem
from coordinator.problem.placement import PlacementProblem
from coordinator.problem.read import problem_from_json, read_problem
from tests.planning.cases import BEST_KNOWN, heterogeneous, published
from tests.reproductions.evolutionary import evolve


def chain_suite() -> list[dict[str, Any]]:
    rows = []
    for name in ("config-16", "config-32", "config-64", "stim-16", "stim-32", "stim-64"):
        problem = read_problem(published("sky-bert160"), devices=name)
        assert isinstance(problem, ChainProblem)
        chain = Chain(problem)
        methods = {
            "even": plan_even,
            "dynamic": plan_dynamic,
            "exact, given order": plan_exact_in_order,
            "exact": plan_exact,
        }
        for method, run in methods.items():
            begun = stopping.time.monotonic()
            row: dict[str, Any] = {"case": name, "method": method}
            try:
                found = run(problem)
                row |= {"over_fluid_bound": found.bottleneck / chain.fluid_bound, "proven": found.proven}
            except Infeasible as error:
                row |= {"infeasible": str(error)}
            rows.append(row | {"seconds": stopping.time.monotonic() - begun})
    return rows


def placement(
    name: str,
    *,
    tile: int = 1,
    stages: int = 8,
    renumber: int | None = None,
    noise: int | None = None,
    symmetric: bool = False,
) -> PlacementProblem:
    """A published case, each device `tile` times, renumbered, links scaled by 0.7-1.4 (delay), 0.6-1.2 (bandwidth)."""
    raw = json.loads(published(name).read_text())
    for key, spread in (("delay_ms", (0.7, 1.4)), ("bandwidth_gbit_per_s", (0.6, 1.2))):
        matrix = np.kron(np.array(raw[key]), np.ones((tile, tile)))
        if renumber is not None:
            order = np.random.default_rng(renumber).permutation(len(matrix))
            matrix = matrix[np.ix_(order, order)]
        if noise is not None:
            factor = np.random.default_rng(noise).uniform(*spread, matrix.shape)
            matrix = matrix * (np.triu(factor) + np.triu(factor, 1).T if symmetric else factor)
        raw[key] = matrix.tolist()
    raw["stages"], raw["replicas"] = stages, 64 * tile // stages
    made = problem_from_json(raw)
    assert isinstance(made, PlacementProblem)
    return made


def place_suite(seconds: float, seeds: int, baseline: float, only: str, draws: int) -> list[dict[str, Any]]:
    cases = {name: placement(name) for name in BEST_KNOWN}
    cases |= {f"{name}, renumbered": placement(name, renumber=1) for name in BEST_KNOWN}
    for draw in range(draws):
        told = f", draw {draw}" if draw else ""
        for name in BEST_KNOWN:
            cases[f"{name}, disturbed{told}"] = placement(name, renumber=3, noise=4 + 10 * draw, symmetric=True)
            cases[f"{name}, asymmetric{told}"] = placement(name, renumber=5, noise=6 + 10 * draw)
    cases["worldwide, 128 devices"] = placement("worldwide", tile=2, renumber=1, noise=1)
    cases["worldwide, 128 devices, 16 stages"] = placement("worldwide", tile=2, stages=16, renumber=1, noise=1)
    cases["worldwide, 256 devices, 16 stages"] = placement("worldwide", tile=4, stages=16, renumber=1, noise=1)
    cases["spot, 256 devices, 16 stages"] = placement("spot", tile=4, stages=16, renumber=1, noise=1)
    rows = []
    for name, problem in cases.items():
        if not re.search(only, name):
            continue
        costs = costs_of(problem)
        row: dict[str, Any] = {
            "case": name,
            "best_known": BEST_KNOWN.get(name.split(",")[0]) if "," not in name else None,
        }
        for seed in range(seeds):
            found = plan_place(problem, Stop(seconds), seed=seed)
            assert abs(grid_cost(costs, np.array(found.grid)) - found.cost) < 1e-9 * found.cost
            row.setdefault("ours", []).append(
                {
                    "seed": seed,
                    "cost": found.cost,
                    "bound": found.lower_bound,
                    "start": found.start,
                    "curve": [(s, c) for s, _, c in found.curve],
                }
            )
        if baseline > 0:
            _, cost, curve = evolve(costs, Stop(baseline * seconds), seed=0)
            row["published_search"] = {
                "seconds": baseline * seconds,
                "cost": cost,
                "curve": [(s, c) for s, _, c in curve],
            }
            row["ours_over_published"] = max(run["cost"] for run in row["ours"]) / cost
        rows.append(row)
        print(json.dumps({k: v for k, v in row.items() if k != "published_search"})[:200], file=sys.stderr)
    return rows


def joint_suite(seconds: float, seeds: int) -> list[dict[str, Any]]:
    rows = []
    for name in BEST_KNOWN:
        for seed in range(seeds):
            problem = heterogeneous(name, seed)
            split = placed(problem, 8, 8, Stop(seconds), split="best").predicted_seconds
            grid = plan_joint(replace(problem, stages=(8,), replicas=(8,)), Stop(seconds), seed=seed)
            wide = replace(problem, schedules=("gpipe", "1f1b"), syncs=("allreduce", "sharded_ps"))
            free = plan_joint(wide, Stop(2 * seconds), seed=seed)
            assert split is not None and grid.predicted_seconds is not None and free.predicted_seconds is not None
            rows.append(
                {
                    "case": f"{name}, seed {seed}",
                    "placed_then_split_seconds": split,
                    "joint_same_shape_seconds": grid.predicted_seconds,
                    "joint_free_seconds": free.predicted_seconds,
                    "lower_bound_seconds": free.lower_bound_seconds,
                    "free_shape": f"{free.stages} x {free.replicas}, {free.schedule}, {free.sync.name}",
                    "gain_same_shape": split / grid.predicted_seconds,
                    "gain_free": split / free.predicted_seconds,
                    "curve": [
                        (t["after_seconds"], t["seconds"]) for t in sorted(grid.tried, key=lambda t: t["after_seconds"])
                    ],
                }
            )
            print(json.dumps(rows[-1])[:260], file=sys.stderr)
    return rows


def main() -> None:
    line = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    line.add_argument("--suite", nargs="+", choices=("chain", "place", "joint"), default=("chain", "place", "joint"))
    line.add_argument("--seconds", type=float, default=3.0, help="of every search (default: %(default)s)")
    line.add_argument("--seeds", type=int, default=2, help="seeds of every case (default: %(default)s)")
    line.add_argument(
        "--baseline", type=float, default=10.0, help="times our seconds for the published search; 0: skip it"
    )
    line.add_argument("--draws", type=int, default=1, help="place: draws of the disturbed cases (default: %(default)s)")
    line.add_argument("--only", default="", help="place: cases whose name this regular expression finds")
    line.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a busy machine")
    given = line.parse_args()
    if given.clock == "cpu":
        stopping.time.monotonic = time.process_time  # type: ignore[assignment]
    result: dict[str, Any] = {"seconds": given.seconds, "clock": given.clock}
    if "chain" in given.suite:
        result["chain"] = chain_suite()
    if "place" in given.suite:
        result["place"] = place_suite(given.seconds, given.seeds, given.baseline, given.only, given.draws)
    if "joint" in given.suite:
        result["joint"] = joint_suite(given.seconds, given.seeds)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
