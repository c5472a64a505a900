"""Emulated links for users with root: a `tc` script for one host (Linux traffic control, htb and netem)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from facility.exchange.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Way:
    """From this host to another."""

    address: str
    """Of the other host, IPv4 or IPv6."""
    latency_seconds: float
    """One way."""
    bytes_per_second: float


def shaping_script(interface: str, ways: Sequence[Way]) -> str:
    """A script that slows down what this host sends to each address; `sh SCRIPT clear` takes it away again."""
    if not interface.replace("-", "").replace("_", "").replace(".", "").isalnum():
        raise ConfigurationError(f"interface is {interface!r}, expected a name such as eth0")
    lines = [
        "#!/bin/sh",
        "# Emulated links by Linux traffic control; run as root. `sh THIS clear` removes them.",
        "set -eu",
        f"interface={interface}",
        'tc qdisc del dev "$interface" root 2>/dev/null || true',
        '[ "${1:-}" = clear ] && exit 0',
        'tc qdisc add dev "$interface" root handle 1: htb default 1',
        'tc class add dev "$interface" parent 1: classid 1:1 htb rate 100gbit',
    ]
    for number, way in enumerate(ways, start=2):
        if not way.bytes_per_second > 0 or not way.latency_seconds >= 0:
            raise ConfigurationError(f"the way to {way.address} has bandwidth {way.bytes_per_second}, expected above 0")
        bits = max(8, round(8 * way.bytes_per_second))
        delay = round(1e6 * way.latency_seconds)
        # netem must hold what is on its way: bandwidth x delay in packets of 1,500 bytes, and half as much again.
        limit = max(1000, round(1.5 * way.bytes_per_second * way.latency_seconds / 1500))
        lines += [
            f'tc class add dev "$interface" parent 1: classid 1:{number:x} htb rate {bits}bit ceil {bits}bit',
            f'tc qdisc add dev "$interface" parent 1:{number:x} handle {number:x}0: '
            f"netem delay {delay}us limit {limit}",
            f'tc filter add dev "$interface" {_match(way.address)} flowid 1:{number:x}',
        ]
    return "\n".join(lines) + "\n"


def _match(address: str) -> str:
    """Filters of two protocols have priorities of their own."""
    if ":" in address:
        return f"protocol ipv6 parent 1: prio 2 u32 match ip6 dst {address}/128"
    return f"protocol ip parent 1: prio 1 u32 match ip dst {address}/32"
