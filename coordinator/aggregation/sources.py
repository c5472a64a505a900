"""The model that was sent, the state of the round before and the updates, verified by the pass that reads them.

What was verified is what was used: a file's sha256 is made of the bytes that went into the mean, and compared before
the next model takes its name. So neither is read twice, and a file that is altered while it is read is noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.aggregation.request import Request
from coordinator.aggregation.updates import Update
from facility.exchange.errors import ManifestError, UpdateRefused
from facility.exchange.files.streamed_digest import StreamedDigest
from facility.exchange.messages.manifest import (
    NAME,
    Manifest,
    check_digest,
    read_manifest,
    streamed_digest,
    tensor_files,
    verify_manifest,
)


class DamagedUpdate(UpdateRefused):
    """An update whose content is not what its manifest says, or not finite, as only reading all of it could find."""


@dataclass(kw_only=True)
class Sources:
    """Directories whose tensor files are still to be compared with their manifests."""

    manifests: dict[Path, Manifest] = field(default_factory=dict)
    """By directory; everything in it but the files of `hashed` is verified."""
    hashed: dict[Path, StreamedDigest] = field(default_factory=dict)
    facilities: dict[Path, str] = field(default_factory=dict)
    """Whose update a directory is."""

    def promise(self, directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
        """Compare the files `names` of a directory later."""
        self.manifests[directory] = manifest
        for name in names:
            self.hashed[directory / name] = streamed_digest(directory, manifest, name)

    def promise_updates(self, updates: Sequence[Update], verified: set[str]) -> None:
        """Compare the updates but those of the facilities `verified` later."""
        for update in updates:
            if update.facility not in verified and (update.directory / NAME).exists():
                manifest = read_manifest(update.directory)
                self.facilities[update.directory] = update.facility
                self.promise(update.directory, manifest, tensor_files(manifest))

    def check(self) -> None:
        """Raise `ManifestError`, for an update `DamagedUpdate`, for the first file that is not what its manifest says;
        reads what no pass has read."""
        for path, digest in self.hashed.items():
            directory = next(parent for parent in path.parents if parent in self.manifests)
            name = path.relative_to(directory).as_posix()
            try:
                check_digest(directory, self.manifests[directory], name, digest.finish())
            except ManifestError as error:
                if directory not in self.facilities:
                    raise
                raise DamagedUpdate(self.facilities[directory], str(error)) from None


def verify_sources(request: Request) -> None:
    """Read and verify model and state at once: before a facility is blamed for what its update became with them."""
    if request.verify_base:
        verify_manifest(request.base)
    if request.state_in is not None:
        verify_manifest(request.state_in)
