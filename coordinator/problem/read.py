"""Problems as JSON: our own form, a placement case (delays and bandwidths), a chain case (FLOPs and megabytes)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coordinator.problem.chain import ChainProblem
from coordinator.problem.placement import PlacementProblem
from coordinator.problem.printable import read_printable
from coordinator.problem.problem import FORMAT, Codec, Device, Links, Matrix, Problem, SharedLink, Unit
from coordinator.problem.quantities import RATE, SIZE, TIME, find, numbers
from coordinator.problem.runtime import Runtime, runtime_from_json
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.emulation import Emulation
from facility.exchange.validation import check_format, parse_dataclass

MOST_UNITS = 100_000
"""Equal units that one entry may stand for."""
AnyProblem = Problem | ChainProblem | PlacementProblem


def read_problem(path: Path, *, devices: str | None = None, defaults: Mapping[str, Any] | None = None) -> AnyProblem:
    """Read any of the three forms.

    `devices` chooses a set of devices of a chain case; `defaults` fills keys that a measured profile leaves out
    (`batch_samples`, ...). Raises `ConfigurationError`.
    """
    path = Path(path)
    return problem_from_json(read_printable(path), devices=devices, defaults=defaults, file=path)


def problem_from_json(
    raw: Any,
    *,
    devices: str | None = None,
    defaults: Mapping[str, Any] | None = None,
    file: Path | str | None = None,
) -> AnyProblem:
    """A planning problem from plain values, as JSON gives them. Raises `ConfigurationError`."""
    if not isinstance(raw, dict):
        raise ConfigurationError(f"a problem is {raw!r:.60}, expected a mapping", file=file)
    try:
        if "flops" in raw or "blocks" in raw:
            return _chain(raw, devices, file)
        if devices is not None:
            raise ConfigurationError(f"this problem has no named sets of devices, found --devices {devices!r}")
        if any(key.startswith("delay_") for key in raw):
            return _placement(raw, file)
        return _whole({**(defaults or {}), **raw}, file)
    except ConfigurationError as error:
        if error.file is None and file is not None:
            raise ConfigurationError(error.message, file=file, key=error.key) from None
        raise


def _quantity(
    raw: Mapping[str, Any],
    stem: str,
    units: Mapping[str, float],
    where: str,
    file: Path | str | None,
    *,
    shape: tuple[int, ...] = (),
    default: float | None = None,
) -> np.ndarray:
    found = find(raw, stem, units, where=where, file=file)
    if found is None:
        if default is not None:
            return np.full(shape, default)
        raise ConfigurationError(f"{where} lacks {stem}_{next(iter(units))}", file=file, key=where)
    return numbers(raw[found[0]], f"{where}.{found[0]}", shape, file) * found[1]


def _matrix(array: np.ndarray) -> Matrix:
    return tuple(map(tuple, array.tolist()))


def _known(raw: Mapping[str, Any], where: str, names: tuple[str, ...], stems: tuple[str, ...] = ()) -> None:
    for key in raw:
        if key not in names and not any(key.startswith(stem + "_") for stem in stems):
            known = [*names, *(f"{stem}_<unit>" for stem in stems)]
            raise ConfigurationError(f"unknown key {where}.{key}; known keys are {', '.join(known)}", key=key)


def _rows(raw: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(raw, list) or not all(isinstance(row, dict) for row in raw):
        raise ConfigurationError(f"{where} is {raw!r:.60}, expected a list of mappings", key=where)
    return raw


# --- our own form -----------------------------------------------------------------------------------------------------

_NUMBERS = ("batch_samples", "local_steps", "sample_tokens")
_TEXTS = ("name", "objective")
_PLAIN = (*_NUMBERS, *_TEXTS, "micro_batch_samples", "stages", "replicas", "schedules", "syncs", "policies")


def _whole(raw: dict[str, Any], file: Path | str | None) -> Problem:
    check_format(raw, FORMAT, file=file)
    # A measured profile may say more (`profile`); the planner reads what it needs.
    _known(raw, "problem", ("format", "devices", "links", "units", "codecs", "runtime", "stalls", "profile", *_PLAIN))
    for key in ("devices", "links", "units"):
        if key not in raw:
            raise ConfigurationError(f"the problem lacks {key}", file=file, key=key)
    devices = tuple(_device(row, n, file) for n, row in enumerate(_rows(raw["devices"], "devices")))
    units: list[Unit] = []
    for n, row in enumerate(_rows(raw["units"], "units")):
        units += _units(row, n, file)
    plain = {key: raw[key] for key in _PLAIN if key in raw}
    for key in ("micro_batch_samples", "stages", "replicas"):
        if isinstance(plain.get(key), int):
            plain[key] = [plain[key]]
    codecs = [
        parse_dataclass(Codec, row, where=f"codecs[{n}]") for n, row in enumerate(_rows(raw.get("codecs", []), ""))
    ]
    shell = {"devices": [], "links": {}, "units": [], "codecs": [], **plain, "format": FORMAT}
    checked = _checked_plain(shell)
    return Problem(
        devices=devices,
        links=_links(raw["links"], len(devices), file),
        units=tuple(units),
        codecs=tuple(codecs),
        stalls=_stalls(raw.get("stalls", {}), file),
        runtime=runtime_from_json(raw["runtime"], file) if "runtime" in raw else Runtime(),
        **checked,
    )


def _stalls(raw: Any, file: Path | str | None) -> Emulation:
    """`{"probability": p, "seconds": s}`: before every forward and backward of every stage."""
    if not isinstance(raw, dict):
        raise ConfigurationError(f"stalls is {raw!r:.60}, expected a mapping", file=file, key="stalls")
    _known(raw, "stalls", ("probability", "seconds", "seed"))
    return Emulation(
        probability=float(numbers(raw.get("probability", 0.0), "stalls.probability", (), file)),
        seconds=float(numbers(raw.get("seconds", 0.0), "stalls.seconds", (), file)),
        seed=int(numbers(raw.get("seed", 0), "stalls.seed", (), file)),
    )


def _checked_plain(raw: dict[str, Any]) -> dict[str, Any]:
    if "batch_samples" not in raw:
        raise ConfigurationError(
            "the problem lacks batch_samples (samples of one optimizer step over all replicas): add it, or give "
            "--batch-samples N"
        )
    values: dict[str, Any] = {}
    for key in _PLAIN:
        if key not in raw:
            continue
        value = raw[key]
        if key in _NUMBERS:
            good = type(value) is int
        elif key in _TEXTS:
            good = isinstance(value, str)
        else:
            kind = str if key in ("schedules", "syncs", "policies") else int
            good = isinstance(value, list | tuple) and all(type(item) is kind for item in value)
            value = tuple(value) if good else value
        if not good:
            raise ConfigurationError(f"{key} is {value!r:.60}, expected whole numbers (or names)", key=key)
        values[key] = value
    return values


def _device(raw: dict[str, Any], number: int, file: Path | str | None) -> Device:
    where = f"devices[{number}]"
    _known(raw, where, ("id", "site", "slowdown", "slowdown_by_kind", "price", "name"), ("memory",))
    memory = find(raw, "memory", SIZE, where=where, file=file)
    limit = None if memory is None or raw[memory[0]] is None else float(_quantity(raw, "memory", SIZE, where, file))
    by_kind = raw.get("slowdown_by_kind", {})
    if not isinstance(by_kind, dict):
        raise ConfigurationError(f"{where}.slowdown_by_kind is {by_kind!r:.60}, expected a mapping", file=file)
    return Device(
        id=str(raw.get("id", number)),
        site=str(raw.get("site", "")),
        memory_bytes=limit,
        slowdown=float(numbers(raw.get("slowdown", 1.0), f"{where}.slowdown", (), file)),
        slowdown_by_kind={
            str(k): float(numbers(v, f"{where}.slowdown_by_kind.{k}", (), file)) for k, v in by_kind.items()
        },
        price=float(numbers(raw.get("price", 1.0), f"{where}.price", (), file)),
    )


def _links(raw: Any, count: int, file: Path | str | None) -> Links:
    if not isinstance(raw, dict):
        raise ConfigurationError(f"links is {raw!r:.60}, expected a mapping", file=file, key="links")
    _known(raw, "links", ("shared",), ("latency", "bandwidth"))
    square = (count, count)
    shared = []
    for n, row in enumerate(_rows(raw.get("shared", []), "links.shared")):
        where = f"links.shared[{n}]"
        _known(row, where, ("name", "sources", "destinations"), ("bandwidth",))
        for key in ("sources", "destinations"):
            value = row.get(key)
            if not isinstance(value, list) or not all(type(item) is int for item in value):
                raise ConfigurationError(f"{where}.{key} is {value!r:.60}, expected device numbers", file=file)
        shared.append(
            SharedLink(
                name=str(row.get("name", n)),
                bandwidth_bytes_per_second=float(_quantity(row, "bandwidth", RATE, where, file)),
                sources=tuple(row["sources"]),
                destinations=tuple(row["destinations"]),
            )
        )
    return Links(
        latency_seconds=_matrix(
            _quantity(_diagonal(raw, "latency", 0.0), "latency", TIME, "links", file, shape=square)
        ),
        bandwidth_bytes_per_second=_matrix(
            _quantity(_diagonal(raw, "bandwidth", 1.0), "bandwidth", RATE, "links", file, shape=square)
        ),
        shared=tuple(shared),
    )


def _diagonal(raw: dict[str, Any], stem: str, value: float) -> dict[str, Any]:
    """A device's link to itself is not measured: null on the diagonal is allowed."""
    copy = dict(raw)
    for key, rows in raw.items():
        if key.startswith(stem + "_") and isinstance(rows, list):
            copy[key] = [
                [value if i == j and cell is None else cell for j, cell in enumerate(row)]
                if isinstance(row, list)
                else row
                for i, row in enumerate(rows)
            ]
    return copy


def _units(raw: dict[str, Any], number: int, file: Path | str | None) -> list[Unit]:
    where = f"units[{number}]"
    sizes = ("parameter", "state", "activation", "stored")
    times = ("forward_overhead", "backward_overhead", "forward", "backward", "update")
    _known(raw, where, ("kind", "count"), (*sizes, *times))
    count = raw.get("count", 1)
    if type(count) is not int or not 1 <= count <= MOST_UNITS:
        raise ConfigurationError(f"{where}.count is {count!r:.60}, expected 1 to {MOST_UNITS:,}", file=file)
    overheads = {key: value for key, value in raw.items() if "_overhead_" in key}
    rest = {key: value for key, value in raw.items() if key not in overheads}

    def size(stem: str, default: float | None = None) -> float:
        return float(_quantity(rest, stem, SIZE, where, file, default=default))

    parameters = size("parameter")
    unit = Unit(
        kind=str(raw.get("kind", "block")),
        parameter_bytes=parameters,
        state_bytes=size("state", 4 * parameters),
        activation_bytes=size("activation"),
        stored_bytes=size("stored", 0.0),
        forward_seconds=float(_quantity(rest, "forward", TIME, where, file)),
        backward_seconds=float(_quantity(rest, "backward", TIME, where, file)),
        forward_overhead_seconds=float(_quantity(overheads, "forward_overhead", TIME, where, file, default=0.0)),
        backward_overhead_seconds=float(_quantity(overheads, "backward_overhead", TIME, where, file, default=0.0)),
        update_seconds=float(_quantity(rest, "update", TIME, where, file, default=0.0)),
    )
    return [unit] * count


# --- published forms --------------------------------------------------------------------------------------------------


def _placement(raw: dict[str, Any], file: Path | str | None) -> PlacementProblem:
    """A case of DT-FM's cost (github.com/DS3Lab/DT-FM, `scheduler/heuristic_evolutionary_solver/config.py`).

    That cost divides "gibibytes" of activations by Gbit/s as if they were gigabytes; the numbers are kept as DT-FM
    reads them.
    """
    delay = _quantity(raw, "delay", TIME, "problem", file, shape=(-1, -1))
    count = len(delay)
    if delay.shape != (count, count):
        raise ConfigurationError(f"delay is {delay.shape[0]} x {delay.shape[1]}, expected a square matrix", file=file)
    bandwidth = _quantity(raw, "bandwidth", RATE, "problem", file, shape=(-1, -1))
    if bandwidth.shape != delay.shape:
        raise ConfigurationError(
            f"bandwidth is {bandwidth.shape[0]} x {bandwidth.shape[1]} and delay {count} x {count}; "
            "expected equal sizes",
            file=file,
        )
    for key in ("stages", "replicas"):
        if type(raw.get(key)) is not int:
            raise ConfigurationError(f"{key} is {raw.get(key)!r}, expected a whole number", file=file, key=key)
    as_read = {"gigabytes_per_stage": 1e9, "gibibytes_per_stage": 1e9, "bytes_per_stage": 1.0}
    across = {"gigabytes_per_boundary": 1e9, "gibibytes_per_boundary": 1e9, "bytes_per_boundary": 1.0}
    known = raw.get("best_known_cost")
    return PlacementProblem(
        latency_seconds=_matrix(delay),
        bandwidth_bytes_per_second=_matrix(bandwidth),
        stages=raw["stages"],
        replicas=raw["replicas"],
        gradient_bytes=float(_quantity(raw, "parameters", as_read, "problem", file)),
        activation_bytes=float(_quantity(raw, "activations", across, "problem", file)),
        best_known_cost=None if known is None else float(known),
    )


def _chain(raw: dict[str, Any], devices: str | None, file: Path | str | None) -> ChainProblem:
    """A case of Sky Computing's allocator: embeddings + (head, body, tail) x blocks + pooler + classifier."""
    for key in ("units", "flops", "blocks", "devices"):
        if key not in raw:
            raise ConfigurationError(f"the problem lacks {key}", file=file, key=key)
    names, blocks, sets = raw["units"], raw["blocks"], raw["devices"]
    if not isinstance(names, list) or len(names) < 4 or type(blocks) is not int or blocks < 1:
        raise ConfigurationError(
            f"units is {names!r:.80} and blocks {blocks!r:.80}, expected a list of four names or more and a whole "
            "number",
            file=file,
        )
    if not isinstance(sets, dict) or not sets:
        raise ConfigurationError(
            f"devices is {sets!r:.80}, expected a mapping of named sets of devices", file=file, key="devices"
        )
    if devices is None and len(sets) > 1:
        raise ConfigurationError(f"choose one set of devices with --devices: {', '.join(sets)}", file=file)
    chosen = next(iter(sets)) if devices is None else devices
    if chosen not in sets:
        raise ConfigurationError(f"no set of devices is called {chosen!r}; there are {', '.join(sets)}", file=file)
    flops = numbers(raw["flops"], "flops", (len(names),), file)
    sizes = _quantity(
        {f"memory_{key}": value for key, value in raw.items() if key in SIZE},
        "memory",
        SIZE,
        "problem",
        file,
        shape=(len(names),),
    )
    # The middle of the list is what repeats: all but the first and the last two.
    order = [0, *list(range(1, len(names) - 2)) * blocks, len(names) - 2, len(names) - 1]
    speeds = numbers(sets[chosen].get("relative_seconds_per_flop"), f"devices.{chosen}", (-1,), file)
    if not (speeds > 0).all() or not np.isfinite(speeds).all():
        wrong = speeds[~((speeds > 0) & np.isfinite(speeds))][0]
        raise ConfigurationError(
            f"devices.{chosen}.relative_seconds_per_flop holds {wrong:g}, expected numbers above 0", file=file
        )
    memory = _quantity(sets[chosen], "memory", SIZE, f"devices.{chosen}", file, shape=(len(speeds),))
    return ChainProblem(
        seconds=_matrix(np.outer(speeds, flops[order])),
        unit_bytes=tuple(sizes[order].tolist()),
        memory_bytes=tuple(memory.tolist()),
        unit_names=tuple(str(names[i]) for i in order),
        time_unit="relative seconds",
    )
