"""A link in user space: two TUN devices, and between them a queue with bandwidth, delay and loss.

For kernels without netem. Run by `coordinator.testbed.link` as a plain script (it needs nothing but the standard
library):  relay.py DEVICE NAMESPACE LOCAL_IP REMOTE_IP RATE_BITS_PER_S ROUND_TRIP_S LOSS MTU READY_FILE
"""

from __future__ import annotations

import collections
import fcntl
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time

TUNSETIFF = 0x400454CA
IFF_TUN = 0x0001
IFF_NO_PI = 0x1000
QUEUE_BYTES = 16 << 20
"""Most that waits in one direction; what comes then is dropped at the tail, like at a router."""


def open_tun(name: str) -> int:
    """A TUN device's file descriptor, not blocking (Linux Documentation/networking/tuntap)."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


class Direction:
    """Packets one way: each waits for its turn on the line (rate) and then for the delay."""

    def __init__(self, source: int, sink: int, rate: float, delay: float, loss: float) -> None:
        self.source, self.sink, self.bytes_per_second, self.delay, self.loss = source, sink, rate / 8, delay, loss
        self.queue: collections.deque[tuple[float, bytes]] = collections.deque()
        self.waiting = self.packets = self.bytes = self.dropped = 0
        self.free = 0.0

    def read(self) -> None:
        """Take what has arrived, at most 64 packets at once."""
        for _ in range(64):
            try:
                packet = os.read(self.source, 65536)
            except BlockingIOError:
                return
            now = time.monotonic()
            if self.waiting + len(packet) > QUEUE_BYTES or (self.loss and random.random() < self.loss):
                self.dropped += 1
                continue
            due = now
            if self.bytes_per_second:
                self.free = max(self.free, now) + len(packet) / self.bytes_per_second
                due = self.free
            self.queue.append((due + self.delay, packet))
            self.waiting += len(packet)

    def write(self, now: float) -> None:
        """Pass on what is due."""
        while self.queue and self.queue[0][0] <= now:
            packet = self.queue.popleft()[1]
            self.waiting -= len(packet)
            try:
                os.write(self.sink, packet)
            except OSError:
                self.dropped += 1
                continue
            self.packets += 1
            self.bytes += len(packet)


def main() -> None:
    device, namespace, local_ip, remote_ip, rate, round_trip, loss, mtu, ready = sys.argv[1:]
    near, far = f"{device}l", f"{device}f"
    local, remote = open_tun(near), open_tun(far)
    subprocess.run(["ip", "link", "set", far, "netns", namespace], check=True)
    for where, name, own, peer in ([], near, local_ip, remote_ip), (["-n", namespace], far, remote_ip, local_ip):
        subprocess.run(["ip", *where, "addr", "add", own, "peer", peer, "dev", name], check=True)
        subprocess.run(["ip", *where, "link", "set", name, "mtu", mtu, "txqueuelen", "4000", "up"], check=True)
    delay = float(round_trip) / 2
    there = Direction(local, remote, float(rate), delay, float(loss))
    back = Direction(remote, local, float(rate), delay, float(loss))
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, stop)
    poll = select.epoll()
    by_source = {local: there, remote: back}
    for descriptor in by_source:
        poll.register(descriptor, select.EPOLLIN)
    with open(ready, "w", encoding="utf-8") as file:
        file.write("ready\n")
    while not stopped:
        now = time.monotonic()
        due = min((d.queue[0][0] for d in (there, back) if d.queue), default=now + 0.5)
        for descriptor, _ in poll.poll(max(0.0, due - now)):
            by_source[descriptor].read()
        now = time.monotonic()
        there.write(now)
        back.write(now)
    counts = {
        name: {"packets": d.packets, "bytes": d.bytes, "dropped": d.dropped}
        for name, d in (("to_facility", there), ("to_coordinator", back))
    }
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
