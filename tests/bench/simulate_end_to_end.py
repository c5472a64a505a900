"""The trainer under different plans on four gloo processes of unequal emulated speed. Prints JSON.

    python -m tests.bench.simulate_end_to_end [--settings few many fast] [--factors 1,2,4,1 1,1,3,3] [--steps 4]
        [--repeats 2]

For every setting `facility.measure` first measures the model, the links and what replicas and pipelines cost on the
four processes; the seconds that each unit of the model sleeps, by its device's factor, are added. The
problem is then planned by `even`, by `exact` (layers to devices in the best order, placed on the line of stages as
they come), by placing first and splitting the layers best afterwards, and by `joint`; `facility.train` runs the plans
in turns in the same processes. Seconds a step are the trainer's own, of its steady steps, beside the simulator's
prediction. Plans are independent of each other's results.

`few`: four sequences a step, so that filling and draining a pipeline weighs. `many`: eight. `fast`: eight, on units
three times as fast, so that messages, collectives and the trainer's own work weigh. `--factors`: slowness of the four
ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from coordinator.planning.solve import placed, solve
from coordinator.planning.stop import Stop
from coordinator.problem.problem import Problem
from coordinator.problem.read import problem_from_json
from coordinator.simulation.pipelines.plans import simulate
from facility.exchange.messages.plan import Plan, write_plan
from tests.bench.asked import at_least
from tests.pico import save_pico
from tests.ports import free_port
from tests.training.federation import write_dataset, write_settings

RANKS, BLOCKS, TOKENS = 4, 10, 16
SETTINGS: dict[str, dict[str, Any]] = {
    "few": {"forward_ms": 24.0, "backward_ms": 48.0, "sequences": 4},
    "many": {"forward_ms": 12.0, "backward_ms": 24.0, "sequences": 8},
    "fast": {"forward_ms": 4.0, "backward_ms": 8.0, "sequences": 8},
}
SHARES = [("embedding", 1, 0.1), ("block", BLOCKS, 1.0), ("head", 1, 0.5)]
"""Kind of unit, how many, sleep against a block's."""


def together(module: list[str], environments: list[dict[str, str]]) -> list[str]:
    """Run `python -m MODULE...` in one process an environment; what they printed. Raises if one fails."""
    port = free_port()
    processes = []
    for rank, extra in enumerate(environments):
        world = len(environments)
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            **extra,
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", *module],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=600)
            if process.returncode:
                raise RuntimeError(f"{module[0]} ended with {process.returncode}:\n{errors[-3000:]}")
            said.append(out)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return said


def measured(folder: Path) -> dict[str, Any]:
    """The profile of four ranks on this machine, for the model in `folder`."""
    out = folder / "profile.json"
    together(
        [
            "facility.measure",
            "--model",
            str(folder / "model"),
            "--out",
            str(out),
            "--tokens",
            str(TOKENS),
            "--samples",
            "1",
            "--clock",
            "cpu",
            "--most-megabytes",
            "8",
            "--threads",
            "1",
        ],
        [{}] * RANKS,
    )
    raw: dict[str, Any] = json.loads(out.read_text())
    return raw


def problem(profile: dict[str, Any], factors: list[float], setting: dict[str, Any]) -> Problem:
    """What was measured, and the sleeps: a device computes `measured + factor x sleep`."""
    raw = {key: value for key, value in profile.items() if key != "profile"}
    shares = {kind: share for kind, _, share in SHARES}
    by_kind: list[dict[str, float]] = [{} for _ in factors]
    units = []
    for unit in profile["units"]:
        share = shares[unit["kind"]]
        own = {side: unit[f"{side}_ms"] + unit[f"{side}_overhead_ms"] for side in ("forward", "backward")}
        sleep = {side: share * setting[f"{side}_ms"] for side in own}
        units.append({**unit, **{f"{s}_ms": own[s] + sleep[s] for s in own}, **{f"{s}_overhead_ms": 0.0 for s in own}})
        for device, factor in enumerate(factors):
            real = sum(own.values())
            by_kind[device][unit["kind"]] = (real + factor * sum(sleep.values())) / (real + sum(sleep.values()))
    devices = [
        {**device, "slowdown": factor, "slowdown_by_kind": kinds}
        for device, factor, kinds in zip(profile["devices"], factors, by_kind, strict=True)
    ]
    found = problem_from_json(
        raw
        | {
            "devices": devices,
            "units": units,
            "batch_samples": setting["sequences"],
            "micro_batch_samples": [1],
            "syncs": ["allreduce"],
        }
    )
    assert isinstance(found, Problem)
    return found


def planned(whole: Problem, seconds: float) -> dict[str, Plan]:
    """Every method's plan."""
    return {
        "even": solve(whole, Stop(seconds), method="even"),
        "exact": solve(whole, Stop(seconds), method="exact"),
        "place then exact split": placed(whole, 2, 2, Stop(seconds), split="best"),
        "joint": solve(whole, Stop(seconds), method="joint"),
    }


def real_seconds(
    plans: dict[str, Plan], folder: Path, factors: list[float], setting: dict[str, Any], steps: int, repeats: int
) -> dict[str, list[float]]:
    """Seconds a step of the trainer under every plan, one of each repetition."""
    settings = write_settings(
        folder / "settings.json", rounds=1, steps=steps, batch_sequences=setting["sequences"], evaluation_sequences=4
    )
    sleeps = [
        [s * setting["forward_ms"] / 1e3, s * setting["backward_ms"] / 1e3] for _, n, s in SHARES for _ in range(n)
    ]
    runs, outs = [], []
    for repeat in range(repeats):
        for number, (title, plan) in enumerate(plans.items()):
            place = folder / f"run-{factors}-{number}-{repeat}"
            place.mkdir()
            write_plan(place / "plan.json", plan)
            outs.append((title, place / "out"))
            runs.append(
                {
                    "port": free_port(),
                    "arguments": [
                        "--model",
                        str(folder / "model"),
                        "--dataset",
                        str(folder / "data"),
                        "--settings",
                        str(settings),
                        "--round",
                        "0",
                        "--out",
                        str(place / "out"),
                        "--plan",
                        str(place / "plan.json"),
                        "--state",
                        str(place / "state"),
                    ],
                }
            )
    (folder / "runs.json").write_text(json.dumps(runs))
    slow = {"SLOW_FACTORS": ",".join(map(str, factors)), "SLOW_UNITS": json.dumps(sleeps)}
    together(["tests.bench.slow_rank", str(folder / "runs.json")], [slow] * RANKS)
    found: dict[str, list[float]] = {title: [] for title in plans}
    for title, out in outs:
        report = json.loads((out / "report.json").read_text())
        found[title].append(setting["sequences"] * TOKENS / report["details"]["tokens_per_second_steady"])
    return found


def compared(whole: Problem, plans: dict[str, Plan], real: dict[str, list[float]]) -> dict[str, Any]:
    """One row a plan, and the ratios."""
    rows = {}
    for title, plan in plans.items():
        rows[title] = {
            "shape": f"{plan.stages} stages x {plan.replicas} replicas, {plan.schedule}",
            "grid": plan.grid,
            "stage_units": plan.stage_units,
            "micro_batches": plan.replica_micro_batches,
            "simulated_seconds_a_step": round(simulate(whole, plan).iteration_seconds, 4),
            "real_seconds_a_step": [round(seconds, 4) for seconds in real[title]],
        }
    joint = statistics.median(real["joint"])
    return {
        "plans": rows,
        "joint_is_faster_than": {title: round(statistics.median(times) / joint, 3) for title, times in real.items()},
        "simulated_over_real": {
            title: round(rows[title]["simulated_seconds_a_step"] / statistics.median(times), 3)  # type: ignore[operator]
            for title, times in real.items()
        },
    }


def main() -> int:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=tuple(SETTINGS))
    top.add_argument("--factors", nargs="+", default=["1,2,4,1", "1,1,3,3"], help="slowness of the four ranks")
    top.add_argument("--steps", type=at_least(3), default=4, help="optimizer steps a run (default 4)")
    top.add_argument("--repeats", type=int, default=2, help="runs of every plan, in turns (default 2)")
    top.add_argument("--seconds", type=float, default=3.0, help="of planning (default 3)")
    options = top.parse_args()
    results = []
    for name in options.settings:
        setting = SETTINGS[name]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            save_pico(folder / "model", num_hidden_layers=BLOCKS)
            write_dataset(
                folder / "data", train=setting["sequences"] * (options.steps + 1), validation=8, block_tokens=TOKENS
            )
            profile = measured(folder)
            for text in options.factors:
                factors = [float(f) for f in text.split(",")]
                whole = problem(profile, factors, setting)
                plans = planned(whole, options.seconds)
                real = real_seconds(plans, folder, factors, setting, options.steps, options.repeats)
                row = {
                    "setting": name,
                    "factors": factors,
                    "runtime": profile["runtime"],
                    **compared(whole, plans, real),
                }
                row["simulated_as_an_ideal_runtime"] = {
                    title: round(simulate(replace(whole, runtime=type(whole.runtime)()), plan).iteration_seconds, 4)
                    for title, plan in plans.items()
                }
                results.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
    print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
