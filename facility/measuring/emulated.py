"""Unequal devices and links for rehearsal: seeded distributions of the literature, or a file.

- `sky`: every device 2 to 7 times as slow, whole numbers (Sky Computing, arXiv 2202.11836: slowdown drawn from 1..6);
- `stimulator`: U[1, 2) times as slow, memory divided by U[1, 3) (the same work's second generator);
- `speeds`: speed 1, 1/2 or 1/4 and memory 1, 2/3 or 1/2 (as used with the networks of DT-FM, arXiv 2206.01288).
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facility.exchange.errors import ConfigurationError
from facility.exchange.json_values import read_values
from facility.exchange.messages.emulation import Emulation
from facility.measuring.names import DISTRIBUTIONS
from facility.measuring.wire import EmulatedLinks, EmulatedUplink

RATES = {
    "bandwidth_gbit_per_s": 1e9 / 8,
    "bandwidth_mbit_per_s": 1e6 / 8,
    "bandwidth_megabytes_per_second": 1e6,
    "bandwidth_bytes_per_second": 1.0,
}
LATENCIES = {"latency_ms": 1e-3, "delay_ms": 1e-3, "latency_seconds": 1.0}
KEYS = ("factors", "memory_factors", "stall_probability", "stall_seconds", "links", "shared", "name", "source")


@dataclass(frozen=True, kw_only=True)
class Emulated:
    """How ranks are slowed down for a rehearsal: devices, memory and links."""

    emulation: Emulation
    memory_factors: tuple[float, ...] = ()
    """Factor on the free memory of rank r; ranks beyond the list: 1."""
    links: EmulatedLinks

    def memory_factor(self, rank: int) -> float:
        return self.memory_factors[rank] if rank < len(self.memory_factors) else 1.0


def drawn(distribution: str, world: int, seed: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(factors of seconds, factors of memory) of `world` ranks. Raises `ConfigurationError` for an unknown name."""
    draw = random.Random(seed)
    if distribution == "sky":
        return tuple(1.0 + draw.randint(1, 6) for _ in range(world)), (1.0,) * world
    if distribution == "stimulator":
        seconds = tuple(draw.uniform(1, 2) for _ in range(world))
        return seconds, tuple(1 / draw.uniform(1, 3) for _ in range(world))
    if distribution == "speeds":
        kinds = [draw.randrange(3) for _ in range(world)]
        return tuple((1.0, 2.0, 4.0)[k] for k in kinds), tuple((1.0, 2 / 3, 1 / 2)[k] for k in kinds)
    raise ConfigurationError(f"no distribution is called {distribution!r}; there are {', '.join(DISTRIBUTIONS)}")


def read_emulated(path: Path | None, distribution: str | None, world: int, seed: int) -> Emulated:
    """From a file, a distribution, or both (the file wins).

    The file: {"factors": [...], "memory_factors": [...], "stall_probability": p, "stall_seconds": s,
    "links": {"latency_ms": [[...]], "bandwidth_gbit_per_s": [[...]], "shared": [{"name", "bandwidth_...", "sources",
    "destinations"}]}}; or one of the published network cases, {"delay_ms": ..., "bandwidth_gbit_per_s": ...}.
    """
    raw: dict[str, Any] = {}
    if path is not None:
        raw = read_values(path)
        if not isinstance(raw, dict):
            raise ConfigurationError(f"found {raw!r:.40}, expected a mapping", file=path)
        if "delay_ms" in raw:
            raw = {"links": {k: v for k, v in raw.items() if k in LATENCIES or k in RATES}}
        if unknown := sorted(set(raw) - set(KEYS)):
            raise ConfigurationError(f"unknown key {unknown[0]!r}; known keys are {', '.join(KEYS)}", file=path)
    factors, memory = drawn(distribution, world, seed) if distribution else ((), ())
    try:
        emulation = Emulation(
            probability=float(raw.get("stall_probability", 0.0)),
            seconds=float(raw.get("stall_seconds", 0.0)),
            factors=tuple(float(f) for f in raw.get("factors", factors)),
            seed=seed,
        )
        memory = tuple(float(f) for f in raw.get("memory_factors", memory))
        if any(not f > 0 for f in memory):
            raise ConfigurationError("memory_factors holds a number that is not above 0")
        links = links_from(raw.get("links", {}), world)
    except ConfigurationError as error:
        raise ConfigurationError(error.message, file=path) from None
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise ConfigurationError(f"holds something of the wrong type: {error}", file=path) from None
    return Emulated(emulation=emulation, memory_factors=memory, links=links)


def links_from(raw: dict[str, Any], world: int) -> EmulatedLinks:
    """Matrices of at least `world` rows as links between ranks."""
    allowed = {*RATES, *LATENCIES, "shared"}
    if unknown := sorted(set(raw) - allowed):
        raise ConfigurationError(f"unknown key links.{unknown[0]}; known keys are {', '.join(sorted(allowed))}")
    latency = _table(raw, LATENCIES, world)
    rate = {pair: value for pair, value in _table(raw, RATES, world).items() if value > 0}
    uplinks = []
    for row in raw.get("shared", []):
        (key,) = (k for k in row if k in RATES)
        uplinks.append(
            EmulatedUplink(
                name=str(row["name"]),
                bytes_per_second=float(row[key]) * RATES[key],
                sources=frozenset(int(r) for r in row["sources"]),
                destinations=frozenset(int(r) for r in row["destinations"]),
            )
        )
    return EmulatedLinks(latency_seconds=latency, bytes_per_second=rate, uplinks=tuple(uplinks))


def _table(raw: dict[str, Any], units: dict[str, float], world: int) -> dict[tuple[int, int], float]:
    found = [key for key in raw if key in units]
    if not found:
        return {}
    rows = raw[found[0]]
    if len(found) > 1 or len(rows) < world or any(len(row) < world for row in rows):
        raise ConfigurationError(f"links.{found[0]} has {len(rows)} rows, expected {world} x {world} at least, once")
    return {
        (a, b): float(rows[a][b]) * units[found[0]]
        for a in range(world)
        for b in range(world)
        if a != b and rows[a][b] is not None
    }
