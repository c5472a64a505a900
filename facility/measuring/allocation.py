"""Measure the allocation that this rank is part of: devices, layers of the model, links; the first rank writes."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from facility.exchange.errors import ConfigurationError
from facility.exchange.files.durable import check_no_special, is_stream, write_text
from facility.exchange.files.storage import file_error_sentence
from facility.measuring.bandwidth import SharpTimes
from facility.measuring.emulated import Emulated, read_emulated
from facility.measuring.layers import LayerSettings, MeasuredUnits, measure_units
from facility.measuring.links import LinkSettings, MeasuredLinks, measure_links
from facility.measuring.profile import MeasuredDevice, Profile, UnitTimes, write_profile
from facility.measuring.round_robin import groups_of
from facility.measuring.running import measure_running
from facility.measuring.table import profile_table
from facility.measuring.traffic_control import Way, shaping_script
from facility.measuring.wire import Wire
from facility.training.devices import device_id, device_name, free_bytes
from facility.training.processes.ranks import Ranks, agree_on_failure, barrier, from_environment
from facility.training.processes.rendezvous import join_ranks, own_address

MOST_SAMPLES = 1 << 20
"""Sequences of a micro-batch."""
TURNS = itertools.count(1)
"""Gatherings through the store, each under keys of its own."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to measure, checked on every rank."""

    emulated: Emulated
    settings: LayerSettings
    labels: list[str]
    """The site (or host) of every rank."""


def measure_allocation(options: argparse.Namespace) -> int:
    """Measure as the command line says; the first rank writes. Raises `CrossFedError` for bad input."""
    ranks = from_environment(options.device)
    join_ranks(ranks, threads=options.threads, timeout_seconds=options.timeout)
    begin = time.monotonic()
    with agree_on_failure(ranks):
        wanted = _wanted(options, ranks)
    emulated, settings = wanted.emulated, wanted.settings
    with agree_on_failure(ranks):
        units = measure_units(options.model, ranks.device, settings, emulation=emulated.emulation, worker=ranks.rank)
    layer_seconds = time.monotonic() - begin
    devices = _gathered(ranks, _this_device(ranks, units, emulated))
    links = _links(options, ranks, wanted, devices)
    known = emulated.links.latency_seconds or emulated.links.bytes_per_second or emulated.links.uplinks
    running = None
    if ranks.world > 1:
        running = measure_running(
            options.model, ranks, settings, None if known else links, timeout_seconds=options.timeout
        )
    if ranks.first:
        seconds = {"layer_seconds": layer_seconds, "link_seconds": time.monotonic() - begin - layer_seconds}
        profile = Profile(
            devices=tuple(_device(one, wanted.labels[r]) for r, one in enumerate(devices)),
            latency_seconds=tuple(map(tuple, links.latency_seconds)),
            bytes_per_second=tuple(map(tuple, links.bytes_per_second)),
            shared=tuple(links.shared),
            chain=units.chain,
            sizes=units.sizes,
            update_seconds={kind: min(one["optimizer"][kind] for one in devices) for kind in units.optimizer_seconds},
            stalls=_stalls(emulated),
            running=running,
            details=_details(options, ranks, settings, emulated, seconds),
        )
        write_profile(options.out, profile)
        if options.tc_out:
            _write_scripts(options, devices, emulated)
        print(json.dumps(profile.to_json(), indent=2) if options.json else profile_table(profile))
    barrier(ranks)
    return 0


def _wanted(options: argparse.Namespace, ranks: Ranks) -> Wanted:
    """Read and check the options. Raises `CrossFedError`."""
    emulated = read_emulated(options.pretend, options.pretend_devices, ranks.world, options.seed)
    samples = sizes_of(options.samples)
    settings = LayerSettings(
        tokens=_tokens(options),
        samples=samples,
        dtype=getattr(torch, options.dtype),
        warmup=options.warmup,
        repeats=options.repeats,
        task=options.task,
        cpu_seconds=options.clock == "cpu" and ranks.device.type == "cpu",
    )
    check_out(options.out)
    return Wanted(emulated=emulated, settings=settings, labels=_labels(options, ranks))


def check_out(out: Path) -> None:
    """Raise `ConfigurationError` where no file can be written, before an allocation is measured for it."""
    if not os.path.isdir(out.parent):
        raise ConfigurationError(f"--out {out}: its directory does not exist")
    if os.path.isdir(out):
        raise ConfigurationError(f"--out {out} is a directory, expected a file to write")
    try:
        os.lstat(out)
        if not is_stream(out):
            check_no_special(out)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(file_error_sentence(error)) from None


def _this_device(ranks: Ranks, units: MeasuredUnits, emulated: Emulated) -> dict[str, Any]:
    """What this rank reports of its device, as JSON."""
    return {
        "id": device_id(ranks.device, ranks.local_rank),
        "name": device_name(ranks.device),
        "host": socket.gethostname(),
        "address": own_address(),
        "memory": free_bytes(ranks.device, ranks.local_world) * emulated.memory_factor(ranks.rank),
        "times": [asdict(t) for t in units.times],
        "optimizer": units.optimizer_seconds,
    }


def _details(
    options: argparse.Namespace,
    ranks: Ranks,
    settings: LayerSettings,
    emulated: Emulated,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """How it was measured, for the profile."""
    return {
        "tokens": settings.tokens,
        "dtype": options.dtype,
        "clock": options.clock,
        "torch": torch.__version__,
        "backend": dist.get_backend() if ranks.world > 1 else "none",
        **seconds,
        "pretended": {
            "factors": [emulated.emulation.factor(r) for r in range(ranks.world)],
            "stall_probability": emulated.emulation.probability,
            "stall_seconds": emulated.emulation.seconds,
            "memory_factors": [emulated.memory_factor(r) for r in range(ranks.world)],
            "links": bool(emulated.links.latency_seconds or emulated.links.bytes_per_second),
            "seed": options.seed,
        },
    }


def sizes_of(text: str) -> tuple[int, ...]:
    try:
        sizes = sorted(int(part) for part in text.split(","))
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 1 or sizes[-1] > MOST_SAMPLES or len(set(sizes)) < len(sizes):
        raise ConfigurationError(
            f"--samples is {text[:40]!r}, expected different whole numbers of 1 to {MOST_SAMPLES}, such as 1,2,4"
        )
    return tuple(sizes)


def _tokens(options: argparse.Namespace) -> int:
    from facility.training.model import positions_in, read_config

    most = positions_in(read_config(options.model))
    if options.tokens < 0 or (most and options.tokens > most):
        raise ConfigurationError(f"--tokens is {options.tokens}, expected 1 to {most} for this model")
    return options.tokens or min(1024, most or 1024)


def _labels(options: argparse.Namespace, ranks: Ranks) -> list[str]:
    """The site of every rank, or its host."""
    if options.groups:
        labels = [part.strip() for part in options.groups.split(",")]
        if len(labels) != ranks.world:
            raise ConfigurationError(f"--groups names {len(labels)} ranks, but there are {ranks.world}")
        return labels
    return [str(label) for label in _gathered(ranks, options.site or socket.gethostname())]


def _gathered(ranks: Ranks, value: Any) -> list[Any]:
    """`value` of every rank, as JSON through the store that the ranks met at."""
    if ranks.world == 1:
        return [value]
    store = distributed_c10d._get_default_store()
    turn = next(TURNS)
    store.set(f"measure/{turn}/{ranks.rank}", json.dumps(value))
    return [json.loads(store.get(f"measure/{turn}/{rank}")) for rank in range(ranks.world)]


def _links(options: argparse.Namespace, ranks: Ranks, wanted: Wanted, devices: list[Any]) -> MeasuredLinks:
    world, emulated = ranks.world, wanted.emulated
    if world == 1:
        return MeasuredLinks(latency_seconds=[[0.0]], bytes_per_second=[[float("inf")]], shared=[])
    if emulated.links.uplinks and len({one["host"] for one in devices}) > 1:
        raise ConfigurationError(
            "an emulated shared uplink needs all ranks on one host; take `shared` out of --pretend"
        )
    wire = Wire(ranks.rank, ranks.device, emulated.links, distributed_c10d._get_default_store())
    settings = LinkSettings(sharp=SharpTimes(most_bytes=max(2**16, int(1e6 * options.most_megabytes))))
    return measure_links(wire, world, wanted.labels, settings, show_progress=ranks.first)


def _stalls(emulated: Emulated) -> dict[str, float]:
    """What is emulated; real stalls are too rare for a measurement of minutes."""
    emulation = emulated.emulation
    stalls = emulation.probability and emulation.seconds
    return {"probability": emulation.probability, "seconds": emulation.seconds} if stalls else {}


def _device(one: dict[str, Any], label: str) -> MeasuredDevice:
    times = tuple(
        UnitTimes(
            kind=t["kind"],
            samples=tuple(t["samples"]),
            forward_seconds=tuple(t["forward_seconds"]),
            backward_seconds=tuple(t["backward_seconds"]),
        )
        for t in one["times"]
    )
    return MeasuredDevice(id=one["id"], site=label, name=one["name"], memory_bytes=one["memory"], times=times)


def _write_scripts(options: argparse.Namespace, devices: list[dict[str, Any]], emulated: Emulated) -> None:
    options.tc_out.mkdir(parents=True, exist_ok=True)
    hosts = groups_of([one["host"] for one in devices])
    for group in hosts:
        here = devices[group[0]]
        ways = [
            Way(
                address=devices[other[0]]["address"],
                latency_seconds=emulated.links.latency_seconds.get((group[0], other[0]), 0.0),
                bytes_per_second=emulated.links.bytes_per_second.get((group[0], other[0]), 125e6 * 100),
            )
            for other in hosts
            if other is not group
        ]
        write_text(options.tc_out / f"tc-{here['host']}.sh", shaping_script(options.tc_interface, ways))
