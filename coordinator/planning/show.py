"""A plan for people: a table, a picture of the grid, and what one more device or a faster link would bring."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from coordinator.planning.emit import simulated_seconds
from coordinator.planning.joint.plan import plan_joint
from coordinator.planning.stop import Stop
from coordinator.problem.problem import Device, Links, Problem
from facility.exchange.messages.plan import Plan


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """A change of the facility and the seconds an iteration would take."""

    change: str
    seconds: float
    gain: float
    """Share of the present seconds saved."""


def render(plan: Plan, questions: tuple[WhatIf, ...] = ()) -> Group:
    """Everything to print, for a rich console."""
    return Group(_head(plan), Text(), _grid(plan), Text(), _devices(plan), *_what_if(questions), *_reasons(plan))


def show_plan(plan: Plan, problem: Problem | None, *, console: Console | None, seconds: float = 2.0) -> None:
    """Print `plan`; with its problem also what-if questions, answered within about `seconds`."""
    asked = what_if(problem, plan, Stop(seconds)) if problem is not None else ()
    (console or Console(emoji=False)).print(render(plan, asked))


def _head(plan: Plan) -> Text:
    counts = plan.replica_micro_batches
    each = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)}-{max(counts)}"
    text = f"{plan.extent}, {plan.schedule}, {each} micro-batches of {plan.micro_batch_samples}"
    if plan.virtual_stages > 1:
        text += f", {plan.virtual_stages} chunks a device"
    if plan.replicas > 1:
        text += f", {plan.sync.name}"
    if plan.predicted_seconds is not None:
        text += f"\npredicted {plan.predicted_seconds:.4g} s"
        if plan.lower_bound_seconds:
            text += f", lower bound {plan.lower_bound_seconds:.4g} s"
        if plan.gap is not None:
            text += " (optimal)" if plan.gap == 0 else f" (gap {plan.gap:.1%})"
    if plan.cost is not None and plan.cost != plan.predicted_seconds:
        text += f"\n{plan.cost:.5g} {plan.objective}"
    for part, value in plan.predicted_parts.items():
        text += f"\n  {part}: {value:.4g} s"
    return Text(text)


def _name(plan: Plan, device: int) -> str:
    return plan.device_ids[device] if device < len(plan.device_ids) else str(device)


def _layers(plan: Plan, stage: int) -> str:
    return ", ".join(
        f"{first}-{end - 1}" if end - first > 1 else str(first) for first, end in plan.units_of_stage(stage)
    )


def _grid(plan: Plan) -> Table:
    """Stages downwards, replicas to the right; the bar is the share of the iteration a device computes."""
    loads = {load.device: load for load in plan.loads}
    table = Table(title="grid: device, busy share", title_justify="left", show_lines=False)
    table.add_column("stage", justify="right")
    table.add_column("layers")
    shown = min(plan.replicas, 16)
    for replica in range(shown):
        table.add_column(f"replica {replica}")
    if shown < plan.replicas:
        table.add_column(f"... {plan.replicas - shown} more")
    for stage, row in enumerate(plan.grid):
        cells = []
        for device in row[:shown]:
            bar = ""
            if device in loads and loads[device].seconds + loads[device].slack_seconds > 0:
                share = loads[device].seconds / (loads[device].seconds + loads[device].slack_seconds)
                bar = " " + "█" * round(share * 5) + "░" * (5 - round(share * 5))
            cells.append(_name(plan, device) + bar)
        table.add_row(str(stage), _layers(plan, stage), *cells, *([""] if shown < plan.replicas else []))
    return table


def _devices(plan: Plan) -> Table:
    table = Table(title="devices", title_justify="left")
    for name, justify in (("device", "left"), ("stage", "right"), ("replica", "right"), ("layers", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("busy s", "slack s", "memory GB", "of GB"):
        table.add_column(name, justify="right")
    for load in sorted(plan.loads, key=lambda x: plan.place_of(x.device) or (plan.stages, x.device)):
        place = plan.place_of(load.device)
        limit = "-" if load.memory_limit_bytes is None else f"{load.memory_limit_bytes / 1e9:.2f}"
        table.add_row(
            _name(plan, load.device),
            "idle" if place is None else str(place[0]),
            "" if place is None else str(place[1]),
            "" if place is None else _layers(plan, place[0]),
            f"{load.seconds:.4g}",
            f"{load.slack_seconds:.4g}",
            f"{load.memory_bytes / 1e9:.2f}",
            limit,
        )
    return table


def _what_if(questions: tuple[WhatIf, ...]) -> list[Table | Text]:
    if not questions:
        return []
    table = Table(title="what would help", title_justify="left")
    table.add_column("change")
    table.add_column("seconds", justify="right")
    table.add_column("saves", justify="right")
    for question in questions:
        table.add_row(question.change, f"{question.seconds:.4g}", f"{question.gain:.1%}")
    return [Text(), table]


def _reasons(plan: Plan) -> list[Text]:
    return [Text(), *(Text(f"- {reason}") for reason in plan.reasons)] if plan.reasons else []


def what_if(problem: Problem, plan: Plan, stop: Stop) -> tuple[WhatIf, ...]:
    """One more device, a faster link at every boundary, a faster network between replicas; the best first."""
    now = simulated_seconds(problem, plan)
    found: list[WhatIf] = []

    def add(change: str, seconds: float) -> None:
        found.append(WhatIf(change=change, seconds=seconds, gain=max(0.0, 1 - seconds / now)))

    for stage in range(plan.stages - 1):
        pairs = list(zip(plan.grid[stage], plan.grid[stage + 1], strict=True))
        if stop(0):
            break
        add(
            f"links between stages {stage} and {stage + 1} twice as fast",
            simulated_seconds(_faster(problem, pairs), plan),
        )
    if plan.replicas > 1:
        pairs = [(a, b) for row in plan.grid for a in row for b in row if a < b]
        add("links between replicas twice as fast", simulated_seconds(_faster(problem, pairs), plan))
    fastest = int(problem.factors.mean(axis=1).argmin())
    more = _one_more(problem, fastest)
    again = plan_joint(more, Stop(max(stop.left, 0.5), 2), extra=[replace(plan, device_ids=())])
    assert again.predicted_seconds is not None
    name = problem.devices[fastest].id
    shape = f"{again.stages} x {again.replicas}"
    add(f"one more device like {name}, planned anew ({shape})", min(now, again.predicted_seconds))
    return tuple(sorted(found, key=lambda w: w.seconds))


def _faster(problem: Problem, pairs: list[tuple[int, int]]) -> Problem:
    """The problem with these links, in both directions, of twice the bandwidth (and what they share too)."""
    bandwidth = np.array(problem.links.bandwidth_bytes_per_second)
    both = {*pairs, *((b, a) for a, b in pairs)}
    for a, b in both:
        bandwidth[a, b] *= 2
    shared = tuple(
        replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * 2)
        if any(a in link.sources and b in link.destinations for a, b in both)
        else link
        for link in problem.links.shared
    )
    links = replace(problem.links, bandwidth_bytes_per_second=tuple(map(tuple, bandwidth.tolist())), shared=shared)
    return replace(problem, links=links)


def _one_more(problem: Problem, like: int) -> Problem:
    """A twin of device `like`: its links, its speed, and between the two its best link."""

    def grown(matrix: tuple[tuple[float, ...], ...], own: float) -> tuple[tuple[float, ...], ...]:
        array = np.array(matrix)
        array = np.vstack([array, array[like]])
        array = np.hstack([array, array[:, [like]]])
        array[-1, like] = array[like, -1] = own
        array[-1, -1] = array[like, like]
        return tuple(map(tuple, array.tolist()))

    off = [n for n in range(len(problem.devices)) if n != like] or [like]
    rate, wait = problem.bandwidth[like, off], problem.latency[like, off]
    finite = rate[np.isfinite(rate)]
    twin = replace(problem.devices[like], id=f"{problem.devices[like].id} (twin)")
    devices: tuple[Device, ...] = (*problem.devices, twin)
    shared = tuple(
        replace(
            link,
            sources=link.sources + ((len(devices) - 1,) if like in link.sources else ()),
            destinations=link.destinations + ((len(devices) - 1,) if like in link.destinations else ()),
        )
        for link in problem.links.shared
    )
    links = Links(
        latency_seconds=grown(problem.links.latency_seconds, float(wait.min())),
        bandwidth_bytes_per_second=grown(
            problem.links.bandwidth_bytes_per_second, float(finite.max()) if len(finite) else 1e12
        ),
        shared=shared,
    )
    return replace(problem, devices=devices, links=links)
