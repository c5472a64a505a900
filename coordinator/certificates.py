"""When our ssh certificates expire, by ssh-keygen and the agent: a warning ahead of time, an error afterwards."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from coordinator.config.deployments import Deployment
from coordinator.config.federation import Facility

log = logging.getLogger("coordinator.engine")

SOON = timedelta(hours=2)
"""A certificate that ends within this time is reported."""
LOOK_SECONDS = 300.0
VALID = re.compile(r"^\s+Valid: (?:from \S+ to|before) (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)$", re.MULTILINE)


def read_ends(text: str) -> list[datetime]:
    """Ends of the certificates in what `TZ=UTC ssh-keygen -L` prints; those without an end are left out."""
    return [datetime.fromisoformat(found).replace(tzinfo=UTC) for found in VALID.findall(text)]


def certificate_ends(deployment: Deployment) -> list[datetime]:
    """Ends of the certificates that this login may use: beside its key or, without `key:`, those that ~/.ssh/config
    names for the host, or else the agent's."""
    from coordinator.streamflow_plugin.ssh_settings import certificates_of  # asyncssh takes a while to import

    beside = [f"{Path(deployment.key).expanduser()}-cert.pub"] if deployment.key else []
    files = [one for one in beside or certificates_of(deployment.host, deployment.user) if Path(one).is_file()]
    if deployment.key or files:
        return [end for file in files for end in read_ends(_output_of(["ssh-keygen", "-L", "-f", file]))]
    held = [line for line in _output_of(["ssh-add", "-L"]).splitlines() if "-cert-v01@openssh.com " in line]
    return read_ends(_output_of(["ssh-keygen", "-L", "-f", "-"], "\n".join(held) + "\n")) if held else []


@dataclass(frozen=True, kw_only=True)
class Lifetime:
    """How long the certificate of a login is still good."""

    verdict: Literal["ok", "warning", "fail"]
    found: str
    fix: str = ""


def certificate_lifetime(
    name: str, deployment: Deployment, hours: float = 0.0, now: datetime | None = None
) -> Lifetime | None:
    """None where no certificate has an end. `hours`: how long a job, and so a round, may take."""
    ends = certificate_ends(deployment) if deployment.host else []
    if not ends:
        return None
    now, end = now or datetime.now(UTC), max(ends)
    shown = f"{end.astimezone():%Y-%m-%d %H:%M:%S %Z}"
    renew = f"crossfed login {name}" if deployment.renew else "renew it by the site's own command"
    if end <= now:
        return Lifetime(verdict="fail", found=f"the ssh certificate has ended at {shown}", fix=renew)
    if end - now <= max(SOON, timedelta(hours=hours)):
        found = f"the ssh certificate ends at {shown}, a round may take longer"
        return Lifetime(verdict="warning", found=found, fix=renew)
    return Lifetime(verdict="ok", found=f"the ssh certificate is good until {shown}")


@contextmanager
def certificates_watched(
    facilities: Sequence[Facility],
    every_seconds: float = LOOK_SECONDS,
    expiring: Callable[[str, str], None] = lambda facility, sentence: None,
) -> Iterator[None]:
    """Look every so often until the block ends; each certificate is reported once before its end and once after."""
    end = threading.Event()

    def work() -> None:
        reported: set[str] = set()
        while not end.is_set():
            for facility in facilities:
                one = certificate_lifetime(facility.name, facility.deployment)
                if one is None or one.verdict == "ok" or end.is_set():
                    continue
                if (sentence := f"{facility.name}: {one.found}: {one.fix}") not in reported:
                    reported.add(sentence)
                    log.warning(sentence)
                    expiring(facility.name, sentence)
            end.wait(every_seconds)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()


def _output_of(words: list[str], given: str = "") -> str:
    """What the command prints; '' where it fails or does not exist."""
    try:
        result = subprocess.run(
            words,
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=20,
            env=os.environ | {"TZ": "UTC"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""
