"""Where ranks meet that torchrun starts: in directories of the user alone, never at torchrun's own store.

That store listens on every interface and admits whoever knows the port. On one node all ranks are children of one
agent; its process and that process's start name a directory, so no two runs share one, and one that somebody else made
first is refused (`rendezvous.private_directory`). On several nodes the user names a directory that all nodes see
(`CROSSFED_RENDEZVOUS`): the first rank leaves the job's secret there, and where its own store listens.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from facility.exchange.errors import ConfigurationError, TransientError
from facility.exchange.files.durable import write_bytes, write_json
from facility.exchange.files.listing import names_in
from facility.exchange.files.locks import take_lock, temporary_place
from facility.exchange.json_values import values_in
from facility.exchange.process_start import START, stat_of
from facility.launching.rendezvous import DIRECTORY, SECRET, SECRET_BYTES

AGENT = "TORCHELASTIC_USE_AGENT_STORE"
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
LOOK_SECONDS = 0.2
PREFIX = f"crossfed-torchrun-{os.getuid()}-"
ALIVE = "alive"
"""File in such a directory, whose lock one of the ranks holds to its end."""
BEGINNING_SECONDS = 60.0
"""How old that file is before its lock is asked for: a rank that has made it takes the lock next."""


def under_torchrun() -> bool:
    """Whether a torchrun agent started this process and serves its store."""
    return os.environ.get(AGENT) == "True"


def agents_directory() -> Path:
    """The directory of this process's siblings under one agent, made by the first of them with mode 0700.

    Nothing outlives torchrun's ranks that could remove it, so each start removes what earlier ones left.
    """
    agent, restarts = os.getppid(), os.environ.get(RESTARTS, "0")
    started = stat_of(agent)[START]  # ticks since boot
    place = Path(temporary_place()) / f"{PREFIX}{agent}-{started}-{int(restarts)}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.lstat().st_uid == os.getuid():  # what another account made first is refused once it is used
        held = os.open(place / ALIVE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)  # open until this process ends
        with suppress(OSError):  # without locks no start removes what another left
            take_lock(held, place, wait=False)
    _remove_left(place.parent)
    return place


def _remove_left(folder: Path) -> None:
    """Remove the directories of this user's starts of which no rank is alive."""
    for left in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if left.lstat().st_uid != os.getuid():
                continue
            with open(left / ALIVE, "r+", encoding="utf-8") as file:
                age = time.time() - os.fstat(file.fileno()).st_mtime
                if age > BEGINNING_SECONDS and take_lock(file, left, wait=False):
                    shutil.rmtree(left)


def without_directory() -> ConfigurationError:
    """Why ranks on several nodes do not meet at torchrun's store, and what to do."""
    return ConfigurationError(
        "torchrun on several nodes brings ranks together at a store that admits any process that knows its port: start "
        f"them with `python -m facility.launch`, or set {DIRECTORY} to a directory that all nodes see, of mode 0700 "
        "and made anew for each start"
    )


def announce_store(directory: Path, address: str, port: int, environment: Mapping[str, str] = os.environ) -> None:
    """Leave the secret, and where the first rank's store listens. Raises `ConfigurationError` in a used directory."""
    place = _meeting(directory, environment)
    if place.exists():
        raise ConfigurationError(f"{place} is of an earlier start: {DIRECTORY} has to name a new directory each time")
    if not (directory / SECRET).exists():
        write_bytes(directory / SECRET, secrets.token_bytes(SECRET_BYTES), mode=0o600)
    write_json(place, [address, port])


def find_store(directory: Path, seconds: float, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Where the first rank's store listens. Raises `TransientError` where it does not say so within `seconds`."""
    place, deadline = _meeting(directory, environment), time.monotonic() + seconds
    while place.name not in names_in(directory):
        if time.monotonic() > deadline:
            raise TransientError(f"the first rank did not write {place} within {seconds:.0f} s: do all nodes see it?")
        time.sleep(LOOK_SECONDS)
    address, port = values_in(place)
    return str(address), int(port)


def _meeting(directory: Path, environment: Mapping[str, str]) -> Path:
    return directory / f"meeting-{int(environment.get(RESTARTS, '0'))}.json"
