"""`python -m coordinator.steps.send`: send one facility the whole model, or the difference to the one it holds.

The message is made once a round, when the round that makes the model is closed, and is stored beside the model in the
archive. Who gets it follows from the archive alone: a facility whose update of the round before says that it keeps the
model of that round. All others (new, absent, refused, failed at this round before) get the whole model, and round.json
says why.
"""

from __future__ import annotations

import logging
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.aggregation.state import belong_to, draw_near
from coordinator.archive.rounds import REWOUND, Archive
from coordinator.config.settings import CoordinatorSettings, SendingSettings, read_coordinator_settings
from coordinator.rounds.order import sign_order_or_warn
from coordinator.steps.options import step_parser
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.companions import MOMENTS
from facility.exchange.checkpoints.delta import encode_model
from facility.exchange.delta_codecs import FULL, declared_codec
from facility.exchange.errors import CrossFedError, exit_on_error
from facility.exchange.files.links import link_tree
from facility.exchange.files.paths import resolve_path
from facility.exchange.messages.manifest import bytes_of, read_manifest

log = logging.getLogger("coordinator.steps.send")

FORGOTTEN = 0.5
"""Share of a `sparse` message's residual that the float32 master drops. Facilities that never received it repeat the
same steps; keeping all of it would count them twice, keeping nothing would lose what no facility repeats
(tests/bench/log/learning.md)."""

KEPT = 2
"""Models that a facility keeps (`facility.rounds.models`): the newest two that it received."""


@dataclass(frozen=True, kw_only=True)
class Outgoing:
    """What one facility is sent in one round."""

    path: Path
    encoding: str
    reason: str = ""
    """Why the whole model, where messages are asked for."""

    def __str__(self) -> str:
        return f"{self.encoding}: {self.reason}" if self.reason else self.encoding

    @property
    def bytes(self) -> int:
        return bytes_of(read_manifest(self.path))

    @property
    def moments_bytes(self) -> int:
        return bytes_of(read_manifest(self.path), MOMENTS)


def outgoing(archive: Archive, settings: CoordinatorSettings, facility: str, number: int) -> Outgoing:
    """What `facility` is sent in round `number`, from what the archive knows.

    The final evaluation has the number of rounds, of which more, or after `rounds` was lowered fewer, may have been
    made; its model is that of the last one made.
    """
    done = len(archive.rounds())
    number = done if number >= settings.rounds else min(number, done)
    wanted, whole = settings.sending.encoding, archive.model_for(number)
    message = archive.message_for(number)
    if wanted == "full":
        return Outgoing(path=whole, encoding="full")
    if reason := _why_whole(archive, facility, number, message):
        return Outgoing(path=whole, encoding="full", reason=reason)
    assert message is not None
    return Outgoing(path=message, encoding=read_manifest(message).encoding)


def _why_whole(archive: Archive, facility: str, number: int, message: Path | None) -> str:
    if number == 0 or message is None:
        return "there is no model of a round before"
    before = archive.read_round(number - 1)
    if not message.is_dir():
        return str(before.message.get("reason") or f"round {number - 1} made no message")
    rewound = archive.read_note(REWOUND)
    if rewound.get("round") == number and rewound.get("gone", KEPT) >= KEPT:
        return f"crossfed rewind went back to round {number}: it may keep later models in place of those"
    attempts = archive.read_note("attempts")
    if attempts.get("round") == number and facility in attempts.get("whole", []):
        return f"it failed at round {number} before"
    row = next((row for row in before.facilities if row.facility == facility), None)
    if row is None or not row.holds:
        return f"it has not reported that it keeps the model of round {number - 1}"
    reference = str(read_manifest(message).extra["reference_sha256"])
    if row.holds != reference:
        return f"it keeps the model with sha256 {row.holds:.12}, the message is a difference to {reference:.12}"
    return ""


def make_message(directory: Path, reference: Path, settings: SendingSettings) -> dict[str, Any]:
    """Write `directory`/message, and make `directory`/model what its receivers will hold; returns what round.json says.

    `directory` holds the new model and the state it came with; `reference` is the model of the round before.
    """
    if settings.encoding == FULL:
        return {}
    model, whole = directory / "model", directory / "whole"
    if reason := _unlike(model, reference):
        return {"encoding": "full", "reason": reason}
    codec = declared_codec(settings.encoding)
    model.rename(whole)
    done = encode_model(
        model=whole,
        reference=reference,
        out=directory / "message",
        decoded=model,
        encoding=settings.encoding,
        master=None if codec.lossless else directory / "state" / "master",
        density=settings.sparse_density,
    )
    shutil.rmtree(whole)
    message_bytes, model_bytes = (bytes_of(read_manifest(directory / name)) for name in ("message", "model"))
    if codec.lossless and message_bytes >= model_bytes:
        shutil.rmtree(directory / "message")
        return {"encoding": "full", "reason": f"what changed takes {message_bytes} bytes, the model {model_bytes}"}
    if codec.selects:
        draw_near(directory / "state", open_checkpoint(model), FORGOTTEN)
    belong_to(directory / "state", read_manifest(model))
    return {
        "encoding": settings.encoding,
        "bytes": message_bytes,
        "model_bytes": model_bytes,
        "relative_error": done.relative_error,
        "unchanged_tensors": done.unchanged,
    }


def _unlike(model: Path, reference: Path) -> str:
    """Why there is no difference between the two, or ''."""
    new, old = open_checkpoint(model).tensors, open_checkpoint(reference).tensors
    if names := sorted(new.keys() ^ old.keys()):
        return f"tensor {names[0]!r} is in one model only, of this round and the round before"
    for name, entry in new.items():
        if (entry.dtype, entry.shape) != (old[name].dtype, old[name].shape):
            before = f"{old[name].dtype} {list(old[name].shape)} before"
            return f"tensor {name!r} is {entry.dtype} {list(entry.shape)}, and {before}"
    return ""


def main() -> int:
    parser = step_parser("send", __doc__.split("\n\n")[0], "archive", "model", "round", "facility")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    arguments = parser.parse_args()
    settings = read_coordinator_settings(arguments.federation)
    try:
        if read_manifest(arguments.model).kind != "model":  # of a comparison
            found = Outgoing(path=arguments.model, encoding="full")
        else:
            found = outgoing(Archive(resolve_path(arguments.archive)), settings, arguments.facility, arguments.round)
    except (CrossFedError, OSError) as error:  # a step that fails inside the loop would hang the engine
        found = Outgoing(path=arguments.model, encoding="full", reason=f"the archive cannot be read: {error}")
    source = arguments.model if found.encoding == "full" else found.path
    link_tree(source, arguments.out)
    sign_order_or_warn(arguments.out, settings)
    log.info("round %d: %s is sent %s", arguments.round, arguments.facility, found)
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main, in_job=True))
