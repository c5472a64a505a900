"""Kill a coordinator as a crash does."""

from __future__ import annotations

import subprocess

from coordinator.testbed.command import wait_until
from facility.exchange.process_start import started_at


def kill_coordinator(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for the command; returns once StreamFlow, which it had started, is gone too."""
    listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout
    engines = [int(pid) for pid in listed.split()]
    assert engines, "StreamFlow is not at work"
    process.kill()
    process.wait()
    wait_until(lambda: not [pid for pid in engines if started_at(pid) is not None], 30, "the end of StreamFlow")
