"""What passes between a job that waits for its round and the coordinator, in a directory made for that job.

`command` decides what the job does, and the first to make the file decides: the coordinator, by a link to the
round's command, or the job, by a link to `exit 0` once it has waited for long enough. link(2) fails where the name
exists, so that the tasks of a job, on whatever node, and the coordinator agree. `waited.json` is the job's account.
"""

from __future__ import annotations

from dataclasses import dataclass

from facility.exchange.messages.plausible import MOST_NODES
from facility.exchange.messages.strict_json import Fields, parse_json

SUFFIX = "-ahead"
"""Ends the name of such jobs in the queue: no search for a round's job finds them."""
COMMAND = "command"
WAITED = "waited.json"
GIVEN_UP = "exit 0\n"
"""Content of `command` where the job ends without a round."""
BEGAN = "CROSSFED_JOB_BEGAN"
"""Environment variable of the round's command: when its job began, in seconds since 1970."""
MOST_BYTES = 4096
MOST_SECONDS = 1e7


@dataclass(frozen=True, kw_only=True)
class Waited:
    """How long a job waited for its round, and on how many nodes."""

    seconds: float
    nodes: int = 1
    handed: bool = False
    """It was given a round; else it ended without one."""


def read_waited(text: str) -> Waited:
    """The message in a file's text. Raises `ManifestError` where it is malformed or holds impossible values."""
    found = Fields(raw=parse_json(text[:MOST_BYTES], where=WAITED), where=WAITED).only_of(Waited)
    return Waited(
        seconds=found.number("seconds", most=MOST_SECONDS),
        nodes=found.whole("nodes", 1, least=1, most=MOST_NODES),
        handed=found.flag("handed", False),
    )
