"""Measure this allocation for the planner: devices, layers of the model, links. Writes profile.json.

    python -m facility.measure --model DIR --out profile.json                         one process
    python -m facility.launch -- -m facility.measure --model DIR --out profile.json   all ranks of an allocation

Every rank times each kind of unit of the model (embedding, blocks, head), forwards and backwards, at the given
micro-batch sizes; then all pairs of ranks measure latency and bandwidth in both directions in a tournament, and groups
of ranks load their common ways out. Unequal devices and links can be pretended for rehearsal. The result is a planning
problem without a batch: `python -m coordinator.plan` takes it together with a batch size.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from facility.exchange.errors import ConfigurationError
from facility.exchange.files.durable import write_text
from facility.measuring.layers import TASKS, LayerSettings, measure_units
from facility.measuring.links import LinkSettings, MeasuredLinks, measure_links
from facility.measuring.pretend import DISTRIBUTIONS, Pretended, read_pretended
from facility.measuring.profile import MeasuredDevice, Profile, UnitTimes, write_profile
from facility.measuring.running import measure_running
from facility.measuring.tournament import groups_of
from facility.measuring.traffic_control import Way, script
from facility.measuring.wire import Wire
from facility.training.devices import device_id, device_name, free_bytes
from facility.training.processes.ranks import Ranks, barrier, end, from_environment, together
from facility.training.processes.rendezvous import start


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m facility.measure", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    top.add_argument("--model", type=Path, required=True, help="Hugging Face checkpoint; only its config.json is read")
    top.add_argument("--out", type=Path, required=True, help="profile.json to write")
    top.add_argument(
        "--task", choices=TASKS, default="causal-lm", help="what the model is trained for (default causal-lm)"
    )
    top.add_argument(
        "--tokens", type=int, default=0, help="length of a sequence, tokens (default: 1024, or the model's most)"
    )
    top.add_argument("--samples", default="1,2", help="micro-batch sizes to time, sequences (default 1,2)")
    top.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of forward and backward (default float32)",
    )
    top.add_argument("--repeats", type=int, default=5, help="timed runs, of which the median counts (default 5)")
    top.add_argument("--warmup", type=int, default=2, help="runs before those (default 2)")
    top.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: count CPU time, for rehearsals whose ranks share cores (default wall)",
    )
    top.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default auto)")
    top.add_argument(
        "--threads", type=int, default=0, help="CPU threads a rank; 0: cores / ranks of the node (default 0)"
    )
    top.add_argument("--site", default="", help="name of this site (default: the host's name)")
    top.add_argument("--groups", default="", help="rehearsal: the group (host or site) of every rank, such as a,a,b,b")
    top.add_argument(
        "--most-megabytes", type=float, default=64.0, help="largest message between two ranks, MB (default 64)"
    )
    top.add_argument("--timeout", type=float, default=600.0, help="a hung peer is noticed after, seconds (default 600)")
    top.add_argument("--pretend", type=Path, help="file of factors, stalls, memory and links to pretend (JSON)")
    top.add_argument("--pretend-devices", choices=DISTRIBUTIONS, help="draw unequal devices from a distribution")
    top.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    top.add_argument("--tc-interface", default="eth0", help="for the tc scripts (default eth0)")
    top.add_argument(
        "--tc-out", type=Path, help="directory for one `tc` script a rank that makes the pretended links real (root)"
    )
    top.add_argument("--json", action="store_true", help="print the profile as JSON")
    return top


def main(arguments: list[str] | None = None) -> int:
    """Measure; the first rank writes. Raises `CrossFedError` for bad input."""
    options = parser().parse_args(arguments)
    ranks = from_environment(options.device)
    start(ranks, threads=options.threads, timeout_seconds=options.timeout)
    begin = time.monotonic()
    with together(ranks):
        pretended = read_pretended(options.pretend, options.pretend_devices, ranks.world, options.seed)
        samples = _sizes(options.samples)
        settings = LayerSettings(
            tokens=_tokens(options),
            samples=samples,
            dtype=getattr(torch, options.dtype),
            warmup=max(0, options.warmup),
            repeats=max(1, options.repeats),
            task=options.task,
            cpu_seconds=options.clock == "cpu" and ranks.device.type == "cpu",
        )
        if not options.out.parent.is_dir():
            raise ConfigurationError(f"--out {options.out}: its directory does not exist")
        labels = _labels(options, ranks)
    with together(ranks):
        units = measure_units(options.model, ranks.device, settings, emulation=pretended.emulation, worker=ranks.rank)
    layer_seconds = time.monotonic() - begin
    mine = {
        "id": device_id(ranks.device, ranks.local_rank),
        "name": device_name(ranks.device),
        "host": socket.gethostname(),
        "address": _address(),
        "memory": free_bytes(ranks.device, ranks.local_world) * pretended.memory_factor(ranks.rank),
        "times": [asdict(t) for t in units.times],
        "optimizer": units.optimizer_seconds,
    }
    everybody = _gathered(ranks, mine)
    links = _links(options, ranks, pretended, labels, everybody)
    known = pretended.links.latency_seconds or pretended.links.bytes_per_second or pretended.links.uplinks
    running = measure_running(options.model, ranks, settings, None if known else links) if ranks.world > 1 else None
    if ranks.first:
        seconds = {"layer_seconds": layer_seconds, "link_seconds": time.monotonic() - begin - layer_seconds}
        profile = Profile(
            devices=tuple(_device(one, labels[r]) for r, one in enumerate(everybody)),
            latency_seconds=tuple(map(tuple, links.latency_seconds)),
            bytes_per_second=tuple(map(tuple, links.bytes_per_second)),
            shared=tuple(links.shared),
            chain=units.chain,
            sizes=units.sizes,
            update_seconds={kind: min(one["optimizer"][kind] for one in everybody) for kind in units.optimizer_seconds},
            stalls=_stalls(pretended),
            running=running,
            details=_details(options, ranks, settings, pretended, seconds),
        )
        write_profile(options.out, profile)
        if options.tc_out:
            _write_scripts(options, everybody, pretended)
        print(json.dumps(profile.to_json(), indent=2) if options.json else _table(profile))
    barrier(ranks)
    return 0


def _details(
    options: argparse.Namespace,
    ranks: Ranks,
    settings: LayerSettings,
    pretended: Pretended,
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
            "factors": [pretended.emulation.factor(r) for r in range(ranks.world)],
            "stall_probability": pretended.emulation.probability,
            "stall_seconds": pretended.emulation.seconds,
            "memory_factors": [pretended.memory_factor(r) for r in range(ranks.world)],
            "links": bool(pretended.links.latency_seconds or pretended.links.bytes_per_second),
            "seed": options.seed,
        },
    }


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ConfigurationError(f"--samples is {text!r}, expected whole numbers of 1 or more, such as 1,2,4")
    return sizes


def _tokens(options: argparse.Namespace) -> int:
    from facility.training.model import read_config

    most = getattr(read_config(options.model), "max_position_embeddings", None)
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
    turn = _gathered.turn = getattr(_gathered, "turn", 0) + 1  # type: ignore[attr-defined]
    store.set(f"measure/{turn}/{ranks.rank}", json.dumps(value))
    return [json.loads(store.get(f"measure/{turn}/{rank}")) for rank in range(ranks.world)]


def _address() -> str:
    """This host's address as others see it, without asking anybody."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1: nothing is sent by connecting a datagram socket
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def _links(
    options: argparse.Namespace, ranks: Ranks, pretended: Pretended, labels: list[str], everybody: list[Any]
) -> MeasuredLinks:
    world = ranks.world
    if world == 1:
        return MeasuredLinks(latency_seconds=[[0.0]], bytes_per_second=[[float("inf")]], shared=[])
    if pretended.links.uplinks and len({one["host"] for one in everybody}) > 1:
        raise ConfigurationError(
            "a pretended shared uplink needs all ranks on one host; take `shared` out of --pretend"
        )
    wire = Wire(ranks.rank, ranks.device, pretended.links, distributed_c10d._get_default_store())
    say = (lambda text: print(text, file=sys.stderr, flush=True)) if ranks.first else (lambda text: None)
    settings = LinkSettings(most_bytes=max(2**16, int(1e6 * options.most_megabytes)))
    return measure_links(wire, world, labels, settings, say)


def _stalls(pretended: Pretended) -> dict[str, float]:
    """What is pretended; real stalls are too rare for a measurement of minutes."""
    told = pretended.emulation
    return {"probability": told.probability, "seconds": told.seconds} if told.probability and told.seconds else {}


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


def _write_scripts(options: argparse.Namespace, everybody: list[dict[str, Any]], pretended: Pretended) -> None:
    options.tc_out.mkdir(parents=True, exist_ok=True)
    hosts = groups_of([one["address"] for one in everybody])
    for group in hosts:
        here = everybody[group[0]]
        ways = [
            Way(
                address=everybody[other[0]]["address"],
                latency_seconds=pretended.links.latency_seconds.get((group[0], other[0]), 0.0),
                bytes_per_second=pretended.links.bytes_per_second.get((group[0], other[0]), 125e6 * 100),
            )
            for other in hosts
            if other is not group
        ]
        write_text(options.tc_out / f"tc-{here['host']}.sh", script(options.tc_interface, ways))


def _table(profile: Profile) -> str:
    raw = profile.to_json()
    lines = ["device                          slowdown  free memory  site"]
    for device in raw["devices"]:
        lines.append(
            f"{device['id']:<30}  {device['slowdown']:>8.2f}  {device['memory_bytes'] / 2**30:>7.1f} GiB  "
            f"{device['site']}"
        )
    lines.append("unit            count  forward   backward  of one sample;   parameters    kept a sample")
    for unit in raw["units"]:
        lines.append(
            f"{unit['kind']:<14}  {unit['count']:>5}  {unit['forward_ms'] + unit['forward_overhead_ms']:>7.2f} ms"
            f" {unit['backward_ms'] + unit['backward_overhead_ms']:>7.2f} ms"
            f"  {unit['parameter_bytes'] / 1e6:>20.2f} MB  {unit['stored_bytes'] / 1e6:>9.2f} MB"
        )
    rates = [v for row in raw["links"]["bandwidth_megabytes_per_second"] for v in row if v is not None]
    delays = [v for row in raw["links"]["latency_ms"] for v in row if v is not None]
    if rates:
        lines.append(
            f"links: {min(rates):.4g} to {max(rates):.4g} MB/s, latency {min(delays):.3g} to {max(delays):.3g} ms"
        )
    for link in raw["links"]["shared"]:
        lines.append(f"shared: {link['name']}, {link['bandwidth_megabytes_per_second']:.4g} MB/s together")
    return "\n".join(lines)


if __name__ == "__main__":
    end(main)
