"""Emulated heterogeneity: random stalls, slower workers, speeds that change over time; the same law everywhere.

The trainer's rehearsals, the measuring of devices and the simulator draw from these pure functions: a stall is a
function of (seed, worker, stage, draw) alone, so that the order of draws changes nothing and a simulation meets exactly
the stalls that the processes met.

The stall law is SD-PIPE's (Miao et al., "SDPipe", PVLDB 16(9), 2023, artefact option `--hetero`): before every forward
and before every backward of every stage, with a probability, sleep for a number of seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from facility.exchange.errors import ConfigurationError
from facility.exchange.json_values import read_values
from facility.exchange.scheduling.draws import uniform_draw
from facility.exchange.validation import NonNegative, Positive, ShareOrNone, check_format, validated

FORMAT = 1


@validated(frozen=True, kw_only=True)
class Stalls:
    """What slows workers down, apart from a trace. By default there is no slowdown."""

    probability: ShareOrNone = 0.0
    """Probability of a stall before one forward or one backward of one stage; 0 is off."""
    seconds: NonNegative[float] = 0.0
    """Length of one stall."""
    factors: tuple[Positive[float], ...] = ()
    """Worker (replica) w's compute takes factors[w] times as long, always; workers beyond the list take 1."""
    seed: int = 0
    """Another seed, other stalls."""

    def stalls(self) -> dict[str, Any]:
        """These values alone, by name."""
        return {field.name: getattr(self, field.name) for field in fields(Stalls)}


@validated(frozen=True, kw_only=True)
class Emulation(Stalls):
    """How workers are slowed down for rehearsal."""

    trace: Mapping[int, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    """worker -> ((second, factor), ...) in rising order: from that second on, compute takes factor times as long."""

    def __post_init__(self) -> None:
        for worker, steps in self.trace.items():
            times = [second for second, _ in steps]
            if times != sorted(times) or any(not f > 0 for _, f in steps):
                raise ConfigurationError(f"trace of worker {worker} needs rising seconds and factors above 0")

    @property
    def active(self) -> bool:
        """True if any rank is slowed down."""
        return bool(self.probability and self.seconds) or any(f != 1 for f in self.factors) or bool(self.trace)

    def factor(self, worker: int, at_seconds: float = 0.0) -> float:
        """How many times as long `worker` computes at `at_seconds` since the start."""
        static = self.factors[worker] if worker < len(self.factors) else 1.0
        current = 1.0
        for second, factor in self.trace.get(worker, ()):
            if second > at_seconds:
                break
            current = factor
        return static * current

    def stall(self, worker: int, draw: int, *, stage: int = 0) -> float:
        """Seconds of stall before `worker`'s `draw`-th forward or backward (counted together) of `stage`."""
        if not (self.probability and self.seconds):
            return 0.0
        return self.seconds if uniform_draw(self.seed, worker, stage, draw) < self.probability else 0.0

    def duration(
        self, worker: int, compute_seconds: float, draw: int, *, stage: int = 0, at_seconds: float = 0.0
    ) -> float:
        """Seconds that a compute of `compute_seconds` takes: slowed by the factors, after a possible stall."""
        return compute_seconds * self.factor(worker, at_seconds) + self.stall(worker, draw, stage=stage)


def read_trace(path: Path) -> dict[int, tuple[tuple[float, float], ...]]:
    """Read `{"format": 1, "workers": {"0": [[second, factor], ...]}}`. Raises `ConfigurationError`."""
    try:
        raw = read_values(path)
        check_format(raw, FORMAT, file=path)
        if not isinstance(raw, dict) or set(raw) != {"format", "workers"} or raw["format"] != FORMAT:
            raise ConfigurationError(f'expected {{"format": {FORMAT}, "workers": {{...}}}}', file=path)
        trace = {
            int(worker): tuple((float(second), float(factor)) for second, factor in steps)
            for worker, steps in raw["workers"].items()
        }
        Emulation(trace=trace)
    except ConfigurationError as error:
        raise ConfigurationError(error.message, file=path) from None
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigurationError(f"cannot be read as a trace of speeds: {error}", file=path) from None
    return trace
