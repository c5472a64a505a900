"""The models of the last two rounds, kept at a facility as references for models that arrive as differences.

A message (`facility.exchange.checkpoints.delta`) names the digest of its reference and of the model it decodes to.
Kept models are looked up by digest; without the reference the round fails with the reason, and the coordinator sends
the whole model the next time.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from facility.exchange.checkpoints.delta import decode_update
from facility.exchange.errors import CheckpointError, InputError
from facility.exchange.files import present
from facility.exchange.files.links import link_tree
from facility.exchange.messages.manifest import KEEPS, NAME, Manifest, read_manifest, with_extra


def digest_of(received: Manifest) -> str:
    """Digest of the model that a facility trains from: as it arrived, or as its message decodes."""
    return str(received.extra["decoded_sha256"]) if received.encoding != "full" else received.content_sha256


class Models:
    """What one facility keeps in one federation."""

    def __init__(self, state: Path) -> None:
        self.directory = Path(state) / "models"

    def place(self, digest: str) -> Path:
        return self.directory / digest[:32]

    def holds(self, digest: str) -> bool:
        return present.is_file(self.place(digest) / NAME) and read_manifest(self.place(digest)).content_sha256 == digest

    def whole(self, received: Path) -> Path:
        """Keep the received model; returns the full model's directory. Raises `InputError` without its reference."""
        manifest = read_manifest(received)
        digest, keep = digest_of(manifest), set()
        if manifest.encoding == "full":
            if not self.holds(digest):
                self._appear(received, digest)
        else:
            reference = str(manifest.extra.get("reference_sha256"))
            keep.add(self.place(reference))
            if not self.holds(digest):
                self._decode(received, reference, digest)
        keep.add(self.place(digest))
        for other in set(self.directory.iterdir()) - keep:
            shutil.rmtree(other, ignore_errors=True)
        return self.place(digest)

    def _decode(self, message: Path, reference: str, digest: str) -> None:
        if not self.holds(reference):
            kept = ", ".join(sorted(path.name[:12] for path in self.directory.glob("[!.]*"))) or "none"
            raise InputError(
                f"the model arrived as a difference to the one with sha256 {reference:.12}, and this facility keeps "
                f"{kept} in {self.directory}: it has to be sent in full, as the coordinator does the next time"
            )
        shutil.rmtree(self.place(digest), ignore_errors=True)
        try:
            decode_update(message, reference=self.place(reference), out=self.place(digest))
        except CheckpointError:  # a kept model that was damaged must not be announced again
            shutil.rmtree(self.place(reference), ignore_errors=True)
            raise

    def _appear(self, received: Path, digest: str) -> None:
        place = self.place(digest)
        self.directory.mkdir(parents=True, exist_ok=True)
        temporary = place.with_name(f".{place.name}.{os.getpid()}")
        for path in (*self.directory.glob(".*"), place):  # what a killed job left takes the room of this one
            shutil.rmtree(path, ignore_errors=True)
        try:
            link_tree(received, temporary)
            temporary.rename(place)
        except BaseException:  # a full disk
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def note_kept_model(update: Path, digest: str) -> None:
    """Say in an update's manifest which model this facility keeps."""
    with_extra(update, KEEPS, digest)
