"""Everything at once: grid, layers, stages, replicas, micro-batches and their shares, schedule, agreement, compression.

1. All allowed shapes (stages x replicas, micro-batch size, schedule) get structured layouts (`joint_starts`), costed together.
2. The most promising shapes are annealed (`joint_search`), briefly first; the best of them get the remaining time.
3. The best states of every round are scored by the simulator, which alone decides; with it are chosen the mode of agreement,
   interleaving (several chunks a device) and which links compress.

The even split and the exact split of one pipeline take part as well, so a plan is never slower than those.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from facility.exchange.errors import ConfigurationError
from facility.exchange.plan import CompressedLink, Plan, Schedule, SyncName

from .chain import Infeasible
from .emit import gap, plan_on, predicted, simulated_seconds
from .even import even_spans
from .exact_free import plan_exact
from .joint_cost import Cost, Layouts, joint_bound
from .joint_search import anneal
from .joint_starts import best_cuts, even_share, grids, starts
from .problem import Problem, chain_of
from .stop import Stop


@dataclass
class _Shape:
    """One shape in the race."""

    cost: Cost
    pool: Layouts
    """Its best layouts so far, best first."""
    seconds: np.ndarray
    """Their surrogate seconds."""

    @property
    def name(self) -> str:
        c = self.cost
        return f"{c.stages} x {c.replicas}, micro-batches of {c.samples}, {c.schedule}"


class _Best:
    """The best plan by simulation, and a record of what was tried."""

    def __init__(self, problem: Problem, stop: Stop) -> None:
        self.problem, self.stop = problem, stop
        self.plan: Plan | None = None
        self.seconds = np.inf
        self.origin = ""
        self.tried: dict[str, dict[str, Any]] = {}
        self.seen: set[Any] = set()

    def offer(self, plan: Plan, origin: str) -> float:
        """Simulate; keep the best. Returns its seconds, infinite where a memory is exceeded."""
        key = (plan.grid, plan.stage_units, plan.micro_batches, plan.schedule, plan.sync.name, plan.compressed_links)
        if (*key, plan.micro_batch_samples) in self.seen:
            return np.inf
        self.seen.add((*key, plan.micro_batch_samples))
        seconds = simulated_seconds(self.problem, plan)
        if np.isfinite(seconds):
            entry = self.tried.get(origin)
            if entry is None or seconds < entry["seconds"]:
                self.tried[origin] = {"what": origin, "seconds": seconds, "after_seconds": self.stop.used}
        if seconds < self.seconds * (1 - 1e-9):
            self.plan, self.seconds, self.origin = plan, seconds, origin
        return seconds


def plan_joint(problem: Problem, stop: Stop, *, seed: int = 0, extra: Iterable[Plan] = ()) -> Plan:
    """The best plan found until `stop` (iterations: rounds of annealing). `extra` plans take part. Raises `Infeasible`."""
    rng = np.random.default_rng(seed)
    best = _Best(problem, stop)
    for plan in extra:
        best.offer(plan, "given plan")
    shapes = _shapes(problem, stop)
    for plan, name in one_pipeline(problem):
        if not shapes or _node_count(plan) <= 20_000 or best.plan is None:
            best.offer(plan, name)
    shapes.sort(key=lambda s: float(s.seconds[0]))
    for shape in shapes[:4]:
        _score(problem, best, shape, 1, "structured start")
    rounds = _search(problem, best, shapes, rng, stop)
    if best.plan is None:
        raise _nothing_fits(problem)
    _interleave(problem, best, stop)
    _compress(problem, best)
    found = best.plan
    assert found is not None
    fields = predicted(problem, found)
    bound = min(joint_bound(problem), fields["predicted_seconds"])
    return replace(
        found,
        **fields,
        lower_bound_seconds=bound,
        gap=gap(fields["predicted_seconds"], bound),
        cost=fields["predicted_seconds"],
        objective="simulated seconds of one iteration",
        reasons=_reasons(problem, best, found, rounds),
        tried=tuple(sorted(best.tried.values(), key=lambda t: t["seconds"])[:24]),
    )


def _node_count(plan: Plan) -> int:
    return plan.stages * max(plan.replica_micro_batches)


def one_pipeline(problem: Problem) -> list[tuple[Plan, str]]:
    """The even and the exact split over one pipeline of all devices, for every schedule without interleaving."""
    found: list[tuple[Plan, str]] = []
    samples = min(problem.micro_batch_samples)
    units, devices = len(problem.units), len(problem.devices)
    allowed = not problem.replicas or 1 in problem.replicas
    if problem.batch_samples < samples or not allowed:
        return found
    layouts: dict[str, list[tuple[int, int, int]]] = {"even": even_spans(units, devices)}
    try:
        layouts["exact"] = list(plan_exact(chain_of(problem), seconds=1.0).spans)
    except Infeasible:
        pass
    for name, spans in layouts.items():
        if problem.stages and len(spans) not in problem.stages:
            continue
        for schedule in [s for s in problem.schedules if not s.startswith("interleaved")] or ["1f1b"]:
            plan = plan_on(
                problem,
                [(device,) for device, _, _ in spans],
                [(first, end) for _, first, end in spans],
                micro_batches=[problem.batch_samples // samples],
                micro_batch_samples=samples,
                schedule=cast(Schedule, schedule),
                sync=cast(SyncName, problem.syncs[0]),
            )
            found.append((plan, f"{name}, one pipeline, {schedule}"))
    return found


def _shapes(problem: Problem, stop: Stop) -> list[_Shape]:
    """All allowed shapes that have a layout within memory (or close to it), with their structured layouts."""
    devices, units = len(problem.devices), len(problem.units)
    sizes = [b for b in problem.micro_batch_samples if problem.batch_samples % b == 0]
    if not sizes:
        raise ConfigurationError(
            f"batch_samples {problem.batch_samples} is no multiple of any allowed micro_batch_samples "
            f"{list(problem.micro_batch_samples)}; change one of them"
        )
    schedules = [s for s in problem.schedules if not s.startswith("interleaved")] or ["1f1b"]
    depths = problem.stages or range(1, min(devices, units) + 1)
    found: list[_Shape] = []
    for stages in depths:
        if stages > min(devices, units):
            continue
        most = devices // stages
        widths = problem.replicas or sorted({most, *(r for r in (most - 1, most // 2) if r >= 1 and devices <= 16)})
        for width in widths:
            if width > most:
                continue
            lines = grids(problem, stages, width)
            for samples in sizes:
                if problem.batch_samples // samples < width:
                    continue
                for schedule in schedules:
                    if found and stop.used > 0.4 * stop.seconds:
                        return found
                    cost = Cost(problem, stages, width, samples, schedule)
                    pool = starts(cost, lines)
                    seconds = cost.seconds(pool)
                    order = np.argsort(seconds, kind="stable")[:32]
                    found.append(_Shape(cost, pool.take(order), seconds[order]))
    if not found:
        raise ConfigurationError(
            f"no allowed shape fits {devices} devices, {units} units and {problem.batch_samples} samples: stages "
            f"{list(problem.stages) or 'any'}, replicas {list(problem.replicas) or 'any'}"
        )
    return found


def _search(problem: Problem, best: _Best, shapes: list[_Shape], rng: np.random.Generator, stop: Stop) -> int:
    """Anneal shapes in turn; the field narrows. Returns the rounds made."""
    rounds = 0
    field = shapes[:10]
    plan_of_search = [(10, 250, 48), (4, 600, 64)]
    for width, steps, chains in plan_of_search:
        field = field[:width]
        for shape in field:
            if stop(rounds) and best.plan is not None:
                return rounds
            _round(problem, best, shape, rng, stop, steps=steps, chains=chains, hot=0.03)
            rounds += 1
        field.sort(key=lambda s: float(s.seconds[0]))
    while not stop(rounds):
        shape = field[rounds % min(2, len(field))]
        hot = 0.03 if rounds % 3 else 0.008
        _round(problem, best, shape, rng, stop, steps=1000, chains=64, hot=hot)
        rounds += 1
        if shape.cost.stages * shape.cost.replicas == 1:
            break
    return rounds


def _round(
    problem: Problem,
    best: _Best,
    shape: _Shape,
    rng: np.random.Generator,
    stop: Stop,
    *,
    steps: int,
    chains: int,
    hot: float,
) -> None:
    """One cooling of a shape: half of the chains from its pool, half from random devices; the best are simulated."""
    cost = shape.cost
    width = len(shape.pool.line)
    index = np.arange(chains // 2) % width
    begin = [shape.pool.take(index)]
    lines, cuts, shares = [], [], []
    used = cost.stages * cost.replicas
    equal = even_share(cost.micro_batches, cost.replicas)
    for _ in range(chains - len(index)):
        line = rng.permutation(len(problem.devices))
        cut = best_cuts(cost, line[:used].reshape(cost.stages, cost.replicas), equal)
        lines.append(line)
        cuts.append(shape.pool.cuts[0] if cut is None else cut)
        shares.append(equal)
    begin.append(Layouts(np.array(lines), np.array(cuts), np.array(shares)))
    found, _ = anneal(cost, Layouts.join(begin), rng, stop, steps=steps, hot=hot)
    merged = Layouts.join([shape.pool, found])
    seconds = cost.seconds(merged)
    _, unique = np.unique(
        np.concatenate([merged.line[:, :used], merged.cuts, merged.share], axis=1), axis=0, return_index=True
    )
    order = unique[np.argsort(seconds[unique], kind="stable")][:32]
    shape.pool, shape.seconds = merged.take(order), seconds[order]
    _score(problem, best, shape, 1 if problem.links.shared else 3, "annealed")


def _score(problem: Problem, best: _Best, shape: _Shape, count: int, how: str) -> None:
    """Simulate the best layouts of a shape under every allowed mode of agreement."""
    cost = shape.cost
    if shape.seconds[0] > 1.5 * best.seconds:
        return
    for number in range(min(count, len(shape.seconds))):
        grid = shape.pool.line[number, : cost.stages * cost.replicas].reshape(cost.stages, cost.replicas)
        cuts = shape.pool.cuts[number]
        for sync in problem.syncs if cost.replicas > 1 else problem.syncs[:1]:
            plan = plan_on(
                problem,
                grid.tolist(),
                list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)),
                micro_batches=shape.pool.share[number].tolist(),
                micro_batch_samples=cost.samples,
                schedule=cast(Schedule, cost.schedule),
                sync=cast(SyncName, sync),
            )
            best.offer(plan, f"{shape.name}, {sync}, {how}")


def _interleave(problem: Problem, best: _Best, stop: Stop) -> None:
    """Try to give every device of the best grid several chunks, where allowed; cuts by equal share of each device's work."""
    base = best.plan
    assert base is not None
    names = [s for s in problem.schedules if s.startswith("interleaved")]
    if not names or base.stages < 2:
        return
    samples = base.micro_batch_samples
    work = (problem.forward_seconds(samples) + problem.backward_seconds(samples))[[row[0] for row in base.grid]]
    # Of all replicas the slowest counts.
    for row in range(base.stages):
        each = (problem.forward_seconds(samples) + problem.backward_seconds(samples))[list(base.grid[row])]
        work[row] = each[each.sum(axis=1).argmax()]
    ends = np.array([0.0, *np.cumsum([end - first for first, end in base.stage_units])])
    for virtual in (2, 3, 4):
        chunks = base.stages * virtual
        if chunks > base.units or stop.interrupted:
            break
        sizes = np.diff(ends) / virtual
        cuts = np.rint(np.concatenate([[0.0], np.cumsum(np.tile(sizes, virtual))])).astype(int)
        cuts = np.maximum(cuts, np.arange(chunks + 1))
        cuts = np.minimum(cuts, base.units - np.arange(chunks, -1, -1))
        for schedule in names:
            for counts in _countable(base.replica_micro_batches, base.stages):
                plan = plan_on(
                    problem,
                    base.grid,
                    list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)),
                    micro_batches=counts,
                    micro_batch_samples=samples,
                    schedule=cast(Schedule, schedule),
                    sync=base.sync.name,
                    virtual_stages=virtual,
                )
                best.offer(plan, f"{base.stages} x {base.replicas}, {virtual} chunks a device, {schedule}")


def _countable(counts: tuple[int, ...], stages: int) -> list[tuple[int, ...]]:
    """Interleaving goes in equal rounds of at least `stages` micro-batches: keep the counts only where they divide so."""
    return [counts] if all(count % max(1, count // stages) == 0 for count in counts) else []


def _compress(problem: Problem, best: _Best) -> None:
    """Compress the slowest boundaries first, one pair of stages after another, as long as that saves at least 1 %."""
    for codec in problem.codecs:
        for _ in range(best.plan.stages if best.plan else 0):
            base = best.plan
            assert base is not None
            options: list[tuple[float, int]] = []
            done = {(link.source, link.destination) for link in base.compressed_links}
            for stage in range(base.stages - 1):
                pairs = list(zip(base.grid[stage], base.grid[stage + 1], strict=True))
                if pairs[0] in done:
                    continue
                options.append((max(1 / problem.bandwidth[a, b] for a, b in pairs), stage))
            if not options:
                break
            stage = max(options)[1]
            pairs = list(zip(base.grid[stage], base.grid[stage + 1], strict=True))
            links = tuple(
                CompressedLink(source=s, destination=d, codec=codec.name, ratio=codec.ratio)
                for a, b in pairs
                for s, d in ((a, b), (b, a))
            )
            before = best.seconds
            trial = replace(base, compressed_links=base.compressed_links + links)
            if simulated_seconds(problem, trial) > 0.99 * before:
                break
            best.offer(trial, f"{codec.name} on the boundary after stage {stage}")


def _reasons(problem: Problem, best: _Best, plan: Plan, rounds: int) -> tuple[str, ...]:
    used = plan.world_size
    reasons = [
        f"{plan.stages} stages x {plan.replicas} replicas under {plan.schedule} took {best.seconds:.4g} s in simulation, "
        f"the least of {len(best.seen)} simulated plans; found as: {best.origin} ({rounds} rounds)"
    ]
    others = sorted((t for t in best.tried.values() if t["what"] != best.origin), key=lambda t: t["seconds"])
    shape = f"{plan.stages} x {plan.replicas},"
    other = next((t for t in others if not t["what"].startswith(shape)), None)
    if other is not None:
        reasons.append(
            f"next shape: {other['what']} at {other['seconds']:.4g} s ({other['seconds'] / best.seconds - 1:+.1%})"
        )
    even = min((t["seconds"] for t in others if t["what"].startswith("even")), default=None)
    if even is not None:
        reasons.append(f"the even split over one pipeline takes {even:.4g} s ({even / best.seconds:.2f}x)")
    idle = len(problem.devices) - used
    if idle:
        reasons.append(f"{idle} devices stay idle: no layout tried was faster with them")
    counts = plan.replica_micro_batches
    if len(set(counts)) > 1:
        reasons.append(f"replicas take {min(counts)} to {max(counts)} micro-batches, by their speed")
    if plan.compressed_links:
        reasons.append(f"{len(plan.compressed_links)} links are compressed: that saves more than coding costs")
    return tuple(reasons)


def _nothing_fits(problem: Problem) -> Infeasible:
    """Which memory is short when no shape fits."""
    try:
        plan_exact(chain_of(problem), seconds=2.0)
    except Infeasible as error:
        return error
    return Infeasible(
        "no allowed shape keeps within the memory of the devices, though the model itself fits once; allow fewer replicas, "
        "more stages, smaller micro-batches or the schedule 1f1b"
    )


def replan(problem: Problem, stop: Stop, previous: Plan, *, seed: int = 0, least_gain: float = 0.05) -> Plan:
    """Plan again from new measurements, but move only for a gain of at least `least_gain` of the seconds.

    Raises `ConfigurationError` if the previous plan does not fit the problem's devices or units at all.
    """
    started = time.monotonic()
    fits = all(d < len(problem.devices) for row in previous.grid for d in row) and previous.units == len(problem.units)
    names = tuple(device.id for device in problem.devices)
    known = fits and (not previous.device_ids or previous.device_ids == names)
    now = simulated_seconds(problem, previous) if known else np.inf
    fresh = plan_joint(problem, stop, seed=seed, extra=[previous] if known else [])
    assert fresh.predicted_seconds is not None
    if not np.isfinite(now):
        why = "the previous plan does not fit any more (devices, units or memory have changed)"
        return replace(fresh, reasons=(why, *fresh.reasons))
    share = 1 - fresh.predicted_seconds / now
    if share >= least_gain:
        why = f"moved: {now:.4g} s under the previous plan, {fresh.predicted_seconds:.4g} s now, {share:.1%} less"
        return replace(fresh, reasons=(why, *fresh.reasons))
    fields = predicted(problem, previous)
    why = f"kept: the best other plan would save {max(share, 0):.1%} of {now:.4g} s, less than the {least_gain:.0%} asked for"
    assert fresh.lower_bound_seconds is not None
    return replace(
        previous,
        **fields,
        cost=now,
        objective=fresh.objective,
        lower_bound_seconds=min(fresh.lower_bound_seconds, now),
        gap=gap(now, fresh.lower_bound_seconds),
        reasons=(why,),
        tried=fresh.tried,
        seconds_used=time.monotonic() - started,
    )
