"""Work per round for facilities of unequal speed, queue and links, so that they finish together.

The same parametric search as for layers: for an end time T a facility makes floor((T - fixed) / seconds a step) steps.
The least T at which all together process the wanted samples is found by bisection and snapped to an attained value, so
it is optimal in whole steps. Facilities are divisible loads with start-up costs (Bharadwaj, Ghose, Robertazzi 2003,
"Divisible load theory", Cluster Computing 6(1), section 3); one whose fixed time exceeds T gets no steps, and
the reason is reported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from coordinator.planning.chain import Infeasible
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.plan import read_plan
from facility.exchange.validation import check_format, parse_dataclass, validated

SLACK = 1e-9
"""Share of the samples of a round that may be the rounding of their sum."""


@validated(frozen=True, kw_only=True)
class FacilityPace:
    """How fast a facility works in a round."""

    name: str
    seconds_per_step: float
    """Seconds of one optimizer step under its own plan."""
    samples_per_step: float
    """Samples (or tokens: any unit, the same for all) of one step."""
    queue_seconds: float = 0.0
    """Expected wait in its queue; plan on an upper quantile where waits vary."""
    fixed_seconds: float = 0.0
    """Starting, loading, evaluating, saving, moving the model both ways."""
    minimum_steps: int = 0
    """A facility with fewer is left out of the round."""
    maximum_steps: int | None = None
    """Limit of walltime or data; None: no limit."""

    def __post_init__(self) -> None:
        for name in ("seconds_per_step", "samples_per_step"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigurationError(f"{name} of facility {self.name!r} is {value}, expected more than 0")
        for name in ("queue_seconds", "fixed_seconds", "minimum_steps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigurationError(f"{name} of facility {self.name!r} is {value}, expected 0 or more")
        if self.maximum_steps is not None and self.maximum_steps < max(1, self.minimum_steps):
            raise ConfigurationError(
                f"maximum_steps of facility {self.name!r} is {self.maximum_steps}, expected at least "
                f"{max(1, self.minimum_steps)}"
            )

    def steps_until(self, seconds: float) -> int:
        """Whole steps that end within `seconds` of the round's start; 0 when below the minimum."""
        room = (seconds - self.queue_seconds - self.fixed_seconds) / self.seconds_per_step
        steps = math.floor(room + 1e-9) if room > 0 else 0
        if self.maximum_steps is not None:
            steps = min(steps, self.maximum_steps)
        return steps if steps >= max(1, self.minimum_steps) else 0

    def end(self, steps: int) -> float:
        """Seconds from the round's start until `steps` are done and delivered."""
        return self.queue_seconds + self.fixed_seconds + steps * self.seconds_per_step if steps else 0.0


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Steps of every facility in one round."""

    steps: dict[str, int]
    end_seconds: dict[str, float]
    """From the round's start; facilities left out are absent."""
    round_seconds: float
    """When the last one ends."""
    samples: float
    """Samples of all facilities together."""
    equal_steps_seconds: float
    """Seconds of a round of as many samples with equal steps everywhere, for comparison."""
    reasons: tuple[str, ...]

    def table(self) -> str:
        """Steps and ends, and why, for people."""
        width = max(len(name) for name in self.steps)
        lines = [f"{'facility':<{max(width, 8)}}  steps  ends after s"]
        for name, steps in self.steps.items():
            end = f"{self.end_seconds[name]:12.5g}" if name in self.end_seconds else "           -"
            lines.append(f"{name:<{max(width, 8)}}  {steps:>5}  {end}")
        return "\n".join([*lines, *(f"- {reason}" for reason in self.reasons)])

    def to_json(self) -> dict[str, Any]:
        return {"format": 1, **asdict(self)}


def plan_budget(facilities: Sequence[FacilityPace], samples: float) -> Budget:
    """Steps with which `samples` are done soonest; raises `Infeasible` when the limits forbid them."""
    if not facilities:
        raise ConfigurationError("the budget has no facilities, expected one or more")
    if not (math.isfinite(samples) and samples > 0):
        raise ConfigurationError(f"round_samples is {samples}, expected more than 0")
    names = [f.name for f in facilities]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"two facilities are called {next(n for n in names if names.count(n) > 1)!r}")

    def done(seconds: float) -> float:
        return sum(f.steps_until(seconds) * f.samples_per_step for f in facilities)

    most = sum(math.inf if f.maximum_steps is None else f.maximum_steps * f.samples_per_step for f in facilities)
    if most < samples * (1 - 1e-12):
        raise _short(most, samples, "maximum_steps")
    high = max(f.end(max(f.minimum_steps, 1)) for f in facilities)
    while done(high) < samples * (1 - 1e-12):
        high *= 2
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if done(middle) >= samples * (1 - 1e-12) else (middle, high)
        if high - low <= 1e-12 * high:
            break
    steps = {f.name: f.steps_until(high) for f in facilities}
    _drop_spare(facilities, steps, samples)
    reasons = []
    for f in facilities:
        if not steps[f.name]:
            first = f.end(max(1, f.minimum_steps))
            reasons.append(f"{f.name} is left out: it would need {first:.4g} s for its least work")
        elif f.maximum_steps == steps[f.name]:
            reasons.append(f"{f.name} is at its limit of {f.maximum_steps} steps")
    found = _budget_of(facilities, steps, samples, reasons)
    equal, times = found.equal_steps_seconds, found.equal_steps_seconds / found.round_seconds
    return replace(found, reasons=(*found.reasons, f"equal steps everywhere would take {equal:.4g} s ({times:.2f}x)"))


def plan_within(facilities: Sequence[FacilityPace], bounds: Mapping[str, tuple[int, int]], samples: float) -> Budget:
    """Steps within the `bounds` of each facility, in place of its own limits, with which `samples` are done soonest.

    One that is held at its least leaves the others so much less to do. Raises `Infeasible`, as `plan_budget`.
    """
    held = [replace(f, minimum_steps=bounds[f.name][0], maximum_steps=None) for f in facilities]
    steps = {f.name: f.minimum_steps for f in held}
    rest = [
        replace(f, fixed_seconds=f.end(least) - f.queue_seconds, minimum_steps=0, maximum_steps=most - least)
        for f, (least, most) in ((f, bounds[f.name]) for f in held)
        if most > least
    ]
    left = samples - sum(steps[f.name] * f.samples_per_step for f in held)
    room = sum((f.maximum_steps or 0) * f.samples_per_step for f in rest)
    if left > room + SLACK * samples:
        raise _short(samples - left + room, samples, "rounds.most_steps")
    if left > SLACK * samples:
        wanted = min(left, room)  # the same but for rounding
        steps |= {name: steps[name] + more for name, more in plan_budget(rest, wanted).steps.items()}
        _drop_spare(held, steps, samples)
    reasons = [
        f"{f.name} takes its {word}, {count} steps"
        for f in held
        for word, count in zip(("least", "most"), bounds[f.name], strict=True)
        if steps[f.name] == count
    ]
    return _budget_of(held, steps, samples, reasons)


def _short(most: float, samples: float, limit: str) -> Infeasible:
    return Infeasible(
        f"the facilities may do at most {most:g} samples in a round ({limit}), {samples:g} are asked for: "
        f"short by {samples - most:g}; raise a limit or ask for less"
    )


def _budget_of(
    facilities: Sequence[FacilityPace], steps: Mapping[str, int], samples: float, reasons: Sequence[str]
) -> Budget:
    """The budget of these steps, of which `samples` were asked for."""
    ends = {f.name: f.end(steps[f.name]) for f in facilities if steps[f.name]}
    last = max(ends.values())
    together = f"all end within {last - min(ends.values()):.4g} s of each other; the round takes {last:.4g} s"
    return Budget(
        steps=dict(steps),
        end_seconds=ends,
        round_seconds=last,
        samples=sum(steps[f.name] * f.samples_per_step for f in facilities),
        equal_steps_seconds=_equal(facilities, samples),
        reasons=(together, *reasons),
    )


def hold(
    fresh: Budget, facilities: Sequence[FacilityPace], steps: Mapping[str, int], least_gain: float, samples: float
) -> Budget:
    """`fresh`, or the `steps` in use where it would shorten the round by a share below `least_gain` only, and they do
    the `samples` that `fresh` was made for: a round that does less is shorter for that."""
    ends = {f.name: f.end(steps[f.name]) for f in facilities if steps[f.name]}
    now, done = max(ends.values()), sum(steps[f.name] * f.samples_per_step for f in facilities)
    if done < samples * (1 - SLACK):
        why = f"moved: the steps as they are set do {done:g} of the {samples:g} samples that are asked for"
        return replace(fresh, reasons=(why, *fresh.reasons))
    share = 1 - fresh.round_seconds / now
    if share >= least_gain:
        why = f"moved: the round took {now:.4g} s as it is set, {share:.1%} more than needed"
        return replace(fresh, reasons=(why, *fresh.reasons))
    return replace(
        fresh,
        steps=dict(steps),
        end_seconds=ends,
        round_seconds=now,
        samples=done,
        reasons=(
            f"kept: other steps would save {max(0.0, share):.1%} of {now:.4g} s, "
            f"less than the {least_gain:.0%} asked for",
        ),
    )


def _drop_spare(facilities: Sequence[FacilityPace], steps: dict[str, int], samples: float) -> None:
    """Take back steps that the wanted samples do not need, where the end is latest first."""
    total = sum(steps[f.name] * f.samples_per_step for f in facilities)
    for f in sorted(facilities, key=lambda f: -f.end(steps[f.name])):
        spare = math.floor((total - samples * (1 - 1e-12)) / f.samples_per_step)
        taken = max(0, min(spare, steps[f.name] - max(1, f.minimum_steps)))
        steps[f.name] -= taken
        total -= taken * f.samples_per_step


def _equal(facilities: Sequence[FacilityPace], samples: float) -> float:
    steps = math.ceil(samples / sum(f.samples_per_step for f in facilities) - 1e-9)
    return max(f.end(steps) for f in facilities)


def budget_from_json(raw: Mapping[str, Any], *, file: Path | str | None = None) -> Budget:
    """`{"facilities": [{"name": ..., "seconds_per_step": ..., ...}], "round_samples": N}` to a budget.

    An entry may name a `plan` file instead of its seconds and samples; it is read from beside this one.
    """
    check_format(raw, 1, file=file)
    unknown = set(raw) - {"facilities", "round_samples", "format"}
    if unknown:
        raise ConfigurationError(
            f"unknown key {sorted(unknown)[0]!r}; known keys are facilities, round_samples", file=file
        )
    rows = raw.get("facilities")
    if not isinstance(rows, list):
        raise ConfigurationError(f"facilities is {rows!r:.60}, expected a list", file=file, key="facilities")
    paces = []
    for number, row in enumerate(rows):
        if isinstance(row, dict) and "plan" in row:
            row = dict(row)
            plan = read_plan(Path(file or ".").parent / str(row.pop("plan")))
            if plan.predicted_seconds is None:
                raise ConfigurationError(
                    f"facilities[{number}].plan predicts no seconds; plan again, or give seconds_per_step", file=file
                )
            row.setdefault("seconds_per_step", plan.predicted_seconds)
            row.setdefault("samples_per_step", sum(plan.replica_micro_batches) * plan.micro_batch_samples)
        paces.append(parse_dataclass(FacilityPace, row, where=f"facilities[{number}]", file=file))
    samples = raw.get("round_samples")
    if not isinstance(samples, int | float) or isinstance(samples, bool):
        raise ConfigurationError(f"round_samples is {samples!r}, expected a number", file=file, key="round_samples")
    return plan_budget(paces, float(samples))
