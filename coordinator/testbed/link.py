"""The link between coordinator and a facility: bandwidth, round-trip time and loss.

The kernel's token bucket (tbf) limits bandwidth and netem adds delay and loss where the kernel has it; elsewhere a
relay in user space (`coordinator.testbed.relay`) carries every packet.
"""

from __future__ import annotations

import re
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from coordinator.testbed.command import call, detach, end, recall, remember, wait_until
from coordinator.testbed.layout import Site
from facility.exchange.errors import InputError, TransientError

RELAY_MTU = 9000
"""Bytes of a packet through the relay: fewer, larger packets let a Python process carry more."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a link is like. The zero of every field leaves that property as it is."""

    rate_bits_per_second: float = 0.0
    """Each direction."""
    round_trip_seconds: float = 0.0
    """Added to the veth's own (under 0.1 ms); half of it each way."""
    loss: float = 0.0
    """Share of packets dropped, each direction, 0 to 1."""


def parse(text: str) -> tuple[str | None, Shape]:
    """Read `[FACILITY:]rate=200mbit,rtt=100ms,loss=0.1%`. Raises `InputError`."""
    name, colon, rest = text.rpartition(":")
    values = {}
    for part in rest.split(","):
        key, _, value = part.partition("=")
        if key not in ("rate", "rtt", "loss") or key in values:
            raise InputError(f"--shape {text!r}: found {part!r}, expected rate=200mbit, rtt=100ms or loss=0.1%")
        units = {
            "rate": {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9},
            "rtt": {"ms": 1e-3, "s": 1.0},
            "loss": {"%": 1e-2},
        }[key]
        found = re.fullmatch(r"(\d+(?:\.\d*)?)([a-z%]+)", value)
        if not found or found[2] not in units:
            raise InputError(f"--shape {text!r}: {key} is {value!r}, expected a number and one of {', '.join(units)}")
        values[key] = float(found[1]) * units[found[2]]
    if values.get("loss", 0) >= 1:
        raise InputError(f"--shape {text!r}: a loss of 100% or more passes nothing")
    shape = Shape(
        rate_bits_per_second=values.get("rate", 0.0),
        round_trip_seconds=values.get("rtt", 0.0),
        loss=values.get("loss", 0.0),
    )
    return (name if colon else None), shape


def apply(site: Site, shape: Shape) -> str:
    """Give the link this shape (an empty one takes it away); returns how: `kernel`, `relay` or `plain`."""
    clear(site)
    if shape == Shape():
        return "plain"
    if not (shape.round_trip_seconds or shape.loss):
        for where, device in _ends(site):
            call("tc", *where, "qdisc", "replace", "dev", device, "root", *_tbf(shape))
        return "kernel"
    if _netem(site, shape):
        return "kernel"
    _relay(site, shape)
    return "relay"


def clear(site: Site) -> None:
    """Back to the plain veth pair."""
    for where, device in _ends(site):
        call("tc", *where, "qdisc", "del", "dev", device, "root", check=False)
    relay = recall(site.run / "relay.pid")
    if relay is not None:
        end([relay])
        (site.run / "relay.pid").unlink(missing_ok=True)
        call("ip", "addr", "add", f"{site.coordinator_address}/30", "dev", site.interface, check=False)
        call("ip", "-n", site.namespace, "addr", "add", f"{site.address}/30", "dev", "wan0", check=False)


def _ends(site: Site) -> list[tuple[list[str], str]]:
    """Options and device of the coordinator's end and of the facility's."""
    return [([], site.interface), (["-n", site.namespace], "wan0")]


def _tbf(shape: Shape) -> list[str]:
    """tbf(8): the bucket holds at least 10 ms of traffic, the queue 50 ms."""
    burst = max(65536, int(shape.rate_bits_per_second / 8 / 100))
    return ["tbf", "rate", f"{shape.rate_bits_per_second:.0f}bit", "burst", str(burst), "latency", "50ms"]


def _netem(site: Site, shape: Shape) -> bool:
    """Try the kernel's netem; False when this kernel has none."""
    options = ["delay", f"{shape.round_trip_seconds * 500:.3f}ms", "loss", f"{shape.loss * 100:.5f}%"]
    options += ["limit", "100000"]
    if shape.rate_bits_per_second:
        options += ["rate", f"{shape.rate_bits_per_second:.0f}bit"]
    for where, device in _ends(site):
        if call("tc", *where, "qdisc", "replace", "dev", device, "root", "netem", *options, check=False).returncode:
            return False
    return True


def _relay(site: Site, shape: Shape) -> None:
    """Replace the veth's addresses by a pair of TUN devices with the relay between them."""
    if not Path("/dev/net/tun").exists():
        raise InputError(
            "this kernel has no netem, and /dev/net/tun is absent, so a link cannot be delayed here; ask for rate only"
        )
    call("ip", "addr", "flush", "dev", site.interface)
    call("ip", "-n", site.namespace, "addr", "flush", "dev", "wan0")
    log = site.log / "relay.log"
    here = Path(__file__).resolve()
    command = [sys.executable, str(here.with_name("relay.py")), f"{site.tag}r{site.number}", site.namespace]
    numbers = [shape.rate_bits_per_second, shape.round_trip_seconds, shape.loss, RELAY_MTU]
    ends = [site.coordinator_address, site.address]
    ready = site.run / "relay.ready"
    ready.unlink(missing_ok=True)
    process = detach([*command, *ends, *map(str, numbers), str(ready)], log)
    remember(process.pid, site.run / "relay.pid")

    def up() -> bool:
        if process.poll() is not None:
            raise TransientError(f"the relay of {site.name} ended: {log.read_text(encoding='utf-8').strip()[-400:]}")
        return ready.exists()

    wait_until(up, 10, f"start of the relay of {site.name}")


def round_trip(site: Site) -> float:
    """Seconds of one round trip as a TCP connection to sshd sees it, least of five."""
    least = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        with socket.create_connection((site.address, 22), timeout=10):
            least = min(least, time.perf_counter() - start)
    return least
