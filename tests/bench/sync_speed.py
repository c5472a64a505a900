"""Updates per second of partial reduce (and others) over all-reduce, on real processes with emulated compute.

Eight workers (or four pipelines of four stages, never flushed) are real processes that exchange real tensors over
gloo; a forward and a backward pass are sleeps of 70 and 140 ms with 2 % jitter, stalled and slowed by the shared law
(`facility.exchange.messages.emulation`). All rows and policies of a call run in the same processes one after the
other. Beside each figure stands what the simulator predicts for the same stalls (`coordinator.simulation.replicas`).

    python tests/bench/sync_speed.py --steps 40 --out sync_speed.json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from facility.exchange.messages.emulation import Emulation
from facility.exchange.messages.sync import SyncSettings
from facility.exchange.scheduling.draws import uniform_draw
from facility.exchange.scheduling.policies import POLICIES
from tests.bench.asked import at_least
from tests.ports import free_port

FORWARD, BACKWARD, JITTER = 0.070, 0.140, 0.02
ELEMENTS = 250_000
BARS = {
    "none": 0.97,
    "stall 0.1": 1.30,
    "stall 0.2": 1.50,
    "one 5x slower": 3.5,
    "4x4 stall 0.1": 1.30,
    "4x4 stall 0.1, 110 MB over 10 Gbit/s": 1.30,
}
CALIBRATION = {"lockstep 8": (8, 1), "lockstep 4x4": (4, 4), "pair": (2, 1)}
"""Undisturbed workers, what an exchange costs here, told to the simulator: seconds a step beyond the sleeps (an
exchange among all under `allreduce`; announcement, group and exchange of a pair under `partial_reduce`)."""
WARM = 4
"""First steps that calibration leaves out: connections are made in them."""
ROWS: dict[str, tuple[Emulation, int, int]] = {
    "none": (Emulation(), 8, 1),
    "stall 0.1": (Emulation(probability=0.1, seconds=0.1, seed=1), 8, 1),
    "stall 0.2": (Emulation(probability=0.1, seconds=0.2, seed=2), 8, 1),
    "one 5x slower": (Emulation(factors=(5.0,), seed=3), 8, 1),
    "4x4 stall 0.1": (Emulation(probability=0.1, seconds=0.1, seed=4), 4, 4),
    "4x4 stall 0.1, gradient sent at once": (Emulation(probability=0.1, seconds=0.1, seed=4), 4, 4),
    "4x4 stall 0.1, 110 MB over 10 Gbit/s": (Emulation(probability=0.1, seconds=0.1, seed=4), 4, 4),
}
WIRE = {"4x4 stall 0.1, 110 MB over 10 Gbit/s": (110_000_000, 1.25e9)}
"""Bytes of a stage's parameters and bytes a second of its link; an exchange then sleeps as long as a ring of its
members takes: a quarter of BERT-base (110 M parameters in float32) a stage."""
OWN_STEPS = set(WIRE)
"""Rows in which partial_reduce exchanges parameters alone, after each member's own step, and waits by a window (as
SDPipe does): where an exchange costs half a step, waiting for more of them does not pay."""
EXCHANGE_FIRST = {"4x4 stall 0.1", *WIRE}
"""Rows in which a stage sends its gradient on only after its exchange, as SDPipe's artefact does for every policy."""


def settings_of(policy: str, options: dict[str, Any]) -> SyncSettings:
    return SyncSettings(policy=policy, missing_seconds=60.0, **options)  # type: ignore[arg-type]


def compute(emulation: Emulation, worker: int, stage: int, draw: int) -> float:
    """Seconds of the `draw`-th pass (even: forward, odd: backward), jitter included."""
    base = BACKWARD if draw % 2 else FORWARD
    base *= 1 + JITTER * (2 * uniform_draw("jitter", emulation.seed, worker, stage, draw) - 1)
    return emulation.duration(worker, base, draw, stage=stage)


class SleepingStage:
    """A stage whose passes are sleeps; its parameters are exchanged for real."""

    def __init__(self, emulation: Emulation, worker: int, stage: int, parameter: Any) -> None:
        import torch

        self.emulation, self.worker, self.stage = emulation, worker, stage
        self.parameter, self.gradient, self.message = parameter, torch.full_like(parameter, 1e-3), torch.zeros(1000)

    def forward(self, micro_batch: int, received: Any) -> Any:
        time.sleep(compute(self.emulation, self.worker, self.stage, 2 * micro_batch))
        return self.message

    def backward(self, micro_batch: int, received: Any) -> Any:
        time.sleep(compute(self.emulation, self.worker, self.stage, 2 * micro_batch + 1))
        self.parameter.grad = self.gradient.clone()
        return self.message

    def update(self, micro_batch: int) -> None:
        import torch

        with torch.no_grad():
            self.parameter -= 0.01 * self.parameter.grad


def ring_seconds(row: str, members: int) -> float:
    """Of an exchange over the row's emulated link; 0 where it has none."""
    from facility.sync.runtime.buckets import ring_bytes

    size, speed = WIRE.get(row, (0, 1.0))
    return ring_bytes(size, members) / speed


@contextlib.contextmanager
def emulated_link(row: str) -> Iterator[None]:
    """Exchanges of parameters take at least as long as over the row's link."""
    from facility.sync.runtime.process_groups import Channel

    start, wait, ends = Channel.start_all_reduce, Channel.wait, {}

    def slow_start(self: Any, tensor: Any) -> Any:
        work = start(self, tensor)
        if tensor.numel() >= ELEMENTS:
            volumes = tensor.numel() / ELEMENTS
            ends[id(work)] = time.monotonic() + volumes * ring_seconds(row, self.backend.size())
        return work

    def slow_wait(self: Any, work: Any) -> None:
        wait(self, work)
        time.sleep(max(0.0, ends.pop(id(work), 0.0) - time.monotonic()))

    if row in WIRE:
        Channel.start_all_reduce, Channel.wait = slow_start, slow_wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        Channel.start_all_reduce, Channel.wait = start, wait  # type: ignore[method-assign]


def run_row(rank: int, store: Any, row: str, policy: str, options: dict[str, Any], steps: int, tag: str) -> dict | None:
    """One policy on one row; the first rank returns the figures."""
    import torch
    import torch.distributed as dist

    from facility.sync.connect import connect_replicas
    from facility.sync.protocol import ReplicaRank
    from facility.sync.runtime.replica import Context
    from tests.reproductions.pipedream import run
    from tests.reproductions.stagewise import connect_stage

    emulation, replicas, stages = (Emulation(), *CALIBRATION[row]) if row in CALIBRATION else ROWS[row]
    if rank >= replicas * stages:
        store.get(f"{tag}/over")
        return None
    replica, stage = divmod(rank, stages)
    parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
    place = ReplicaRank(replica=replica, replicas=replicas, position=stage, positions=stages)
    work = SleepingStage(emulation, replica, stage, parameter)
    pipe = None
    if stages > 1:
        pipe = dist.ProcessGroupGloo(
            dist.PrefixStore(f"{tag}/pipe/{replica}", store.clone()), stage, stages, timedelta(seconds=60)
        )
    settings = settings_of(policy, options)
    parts: dict[str, Any] = {"parameters": [parameter], "steps": steps}
    if stages > 1:
        sync = connect_stage(settings, place=place, store=store, namespace=tag, **parts)
    else:
        sync = connect_replicas(Context(settings=settings, place=place, store=store, **parts), namespace=tag)
    begin, warm = time.monotonic(), WARM if row in CALIBRATION and pipe is None else 0
    if pipe is not None:
        made = run(work, sync, pipe, activation=work.message, exchange_first=row in EXCHANGE_FIRST)
    else:
        made = 0
        while sync.wants_more():
            if made == warm:
                begin = time.monotonic()
            sync.before_step(1)
            work.forward(made, None)
            work.backward(made, None)
            sync.reduce_gradients(1)
            work.update(made)
            sync.after_step(1)
            made += 1
    if row not in CALIBRATION:
        sync.finish()
    seconds = time.monotonic() - begin
    if row in CALIBRATION:
        sync.finish()
    report = sync.report()
    sync.close()
    if rank:
        return None
    store.set(f"{tag}/over", "yes")
    updates = sum(report["updates"].values()) - replicas * warm
    keep = (
        "mean_group",
        "groups",
        "alone",
        "mean_staleness",
        "maximum_staleness",
        "wait_seconds",
        "exchange_seconds",
        "updates",
    )
    return {"updates_per_second": updates / seconds, "seconds": seconds, **{k: report[k] for k in keep}}


def worker(rank: int, world: int, port: int, jobs: list[tuple], queue: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=600))
    for number, (row, policy, options, steps) in enumerate(jobs):
        with emulated_link(row):
            result = run_row(rank, store, row, policy, options, steps, f"job{number}")
        if result is not None:
            queue.put((number, result))
    queue.close()
    queue.join_thread()
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < world:
        time.sleep(0.01)
    os._exit(0)


def solo(stages: int, steps: int) -> float:
    """Updates per second of an undisturbed worker of so many stages that exchanges with nobody."""
    from tests.reproductions.endless import simulate_endless

    return simulate_endless(SyncSettings(), 1, stages, lambda r, s, draw: compute(Emulation(), r, s, draw), steps=steps)


def predict(row: str, policy: str, options: dict[str, Any], steps: int, costs: dict[str, float]) -> float:
    """The simulator's updates per second for the same stalls and the measured costs of an exchange."""
    from coordinator.simulation.replicas import ExchangeCosts, simulate_policy
    from tests.reproductions.endless import simulate_endless

    emulation, replicas, stages = ROWS[row]
    settings = settings_of(policy, options)
    if stages > 1:
        seconds = costs["lockstep 4x4" if settings.lockstep else "pair"]
        seconds += ring_seconds(row, replicas if settings.lockstep else 2)
        return simulate_endless(
            settings,
            replicas,
            stages,
            lambda r, s, d: compute(emulation, r, s, d),
            steps=steps,
            exchange_seconds=seconds,
            exchange_first=row in EXCHANGE_FIRST,
        )

    def step(replica: int, number: int, now: float) -> float:
        return compute(emulation, replica, 0, 2 * number) + compute(emulation, replica, 0, 2 * number + 1)

    # From a pair's cost here to that of all eight, in proportion.
    member = max(0.0, (costs["lockstep 8"] - costs["pair"]) / (8 - 2))
    exchange = ExchangeCosts(fixed_seconds=costs["pair"], member_seconds=member, relay_seconds=costs["pair"])
    if settings.lockstep:
        exchange = ExchangeCosts(fixed_seconds=costs["lockstep 8"])
    return simulate_policy(settings, replicas, step, steps=steps, costs=exchange).updates_per_second


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=at_least(1), default=40, help="steps of each worker (default 40)")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument(
        "--policies",
        nargs="*",
        default=["partial_reduce"],
        choices=POLICIES.names(),
        metavar="NAME",
        help="beside allreduce",
    )
    parser.add_argument("--bound", type=int, default=10, help="P, rounds (default 10)")
    parser.add_argument("--minimum", type=int, default=1, help="members of a group at least (default 1)")
    parser.add_argument(
        "--patience", type=float, default=SyncSettings.patience, help="partial_reduce (default %(default)s)"
    )
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    options = {"bound": arguments.bound, "minimum": arguments.minimum, "patience": arguments.patience}

    def options_of(policy: str, row: str) -> dict[str, Any]:
        if policy != "partial_reduce":
            return {}
        return options | ({"step": "own", "patience": 0.0} if row in OWN_STEPS else {})

    chosen_rows = arguments.rows
    calibration = [("lockstep 8", "allreduce")] if any(ROWS[r][2] == 1 for r in chosen_rows) else []
    calibration += [("lockstep 4x4", "allreduce")] if any(ROWS[r][2] > 1 for r in chosen_rows) else []
    calibration += [("pair", "partial_reduce")]
    jobs: list[tuple] = [(row, policy, options_of(policy, row), 40) for row, policy in calibration]
    jobs += [
        (row, policy, options_of(policy, row), arguments.steps)
        for row in arguments.rows
        for policy in ["allreduce", *arguments.policies]
    ]
    world = max(ROWS[row][1] * ROWS[row][2] for row in arguments.rows)
    port = free_port()
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # see CONTRIBUTING.md: torch's store asks for names
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "facility.sync.policies.partial_reduce"])
    queue = context.Queue()
    processes = [context.Process(target=worker, args=(r, world, port, jobs, queue)) for r in range(world)]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=600) for _ in jobs)
    for process in processes:
        process.join()
    table: dict[str, dict[str, Any]] = {}
    costs: dict[str, float] = {}
    for number, (row, policy, chosen, steps) in enumerate(jobs):
        figures = found[number]
        if row in CALIBRATION:
            workers, stages = CALIBRATION[row]
            bare = steps / solo(stages, steps)  # with the filling and draining of a pipeline
            costs[row] = max(0.0, workers / figures["updates_per_second"] - bare / steps)
            continue
        predicted = predict(row, policy, chosen, steps, costs)
        entry = {key: round(v, 4) if isinstance(v, float) else v for key, v in figures.items()}
        entry |= {
            "predicted": round(predicted, 4),
            "prediction_over_measured": round(predicted / figures["updates_per_second"], 4),
        }
        if policy != "allreduce":
            entry["over_allreduce"] = round(
                figures["updates_per_second"] / table[row]["allreduce"]["updates_per_second"], 4
            )
            if policy == "partial_reduce" and row in BARS:
                entry["bar"] = BARS[row]
        table.setdefault(row, {})[policy] = entry
    result = {
        "what": "updates per second, compute emulated by sleeping; ratios within one call",
        "settings": {
            "forward_seconds": FORWARD,
            "backward_seconds": BACKWARD,
            "elements": ELEMENTS,
            "steps": arguments.steps,
            **options,
        },
        "machine": f"{os.cpu_count()} cores",
        "measured_exchange_seconds": {name: round(seconds, 5) for name, seconds in costs.items()},
        "rows": table,
        "emulation": {row: dataclasses.asdict(ROWS[row][0]) for row in arguments.rows},
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
