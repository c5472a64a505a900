"""`manifest.json`: what a model or update directory holds, so that a truncated or altered one is noticed.

Written last. StreamFlow logs a truncated transfer as completed, so the trainer checks it before use and the
coordinator checks it on receipt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from facility.exchange.errors import ManifestError
from facility.exchange.files.audit_log import HEAD, head_digest
from facility.exchange.files.bounded import real_path
from facility.exchange.files.checksum import Checksum, Digest, is_checksum
from facility.exchange.files.durable import write_json
from facility.exchange.files.streamed_digest import StreamedDigest
from facility.exchange.messages.plausible import MOST_ROUNDS
from facility.exchange.messages.strict_json import Fields, read_json

FORMAT = 1
NAME = "manifest.json"
SIGNATURE = "manifest.json.sig"
SEND_AGAIN = "; send it again"
"""Of the manifest, where a facility signs (`facility.exchange.messages.signatures`)."""

MOST_BYTES = 8 << 20
"""Of manifest.json: some 40,000 files."""
MOST_FILES = 40_000
MOST_EXTRA = 100

KEEPS = "keeps_sha256"
"""In an update's `extra`: digest of the model that the facility keeps; the next may be sent as a difference to it."""

STATE = "state"
"""Kind of a directory that never leaves the coordinator, whose files of tensors have checksums."""

RUN = "run"
"""In `extra`: id of one run of a federation from its initial model on. A model and its update carry it."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of the directory."""

    sha256: str = ""
    """Hex digest of the content."""
    size: int
    """Bytes."""
    checksum: str = ""
    """In place of the sha256, in a coordinator's state alone: a `Checksum`."""

    @classmethod
    def of(cls, digest: str, size: int) -> FileEntry:
        """With a sha256 or a checksum."""
        return cls(checksum=digest, size=size) if is_checksum(digest) else cls(sha256=digest, size=size)

    @property
    def digest(self) -> str:
        """Sha256 or checksum, whichever is stated."""
        return self.checksum or self.sha256

    def begin(self) -> Callable[[], Digest]:
        """What makes the digest of no bytes, of the kind that is stated."""
        return Checksum if self.checksum else hashlib.sha256


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a directory holds."""

    kind: str
    """`model` (coordinator to facility), `update` (facility to coordinator), or STATE, among others."""
    federation: str
    """Name of the federation."""
    round: int
    """Round this directory belongs to: a model is the *input* of its round, an update its result."""
    facility: str | None = None
    """Facility that made an update, or to which a model is addressed; None for a model of all facilities."""
    base_sha256: str | None = None
    """Digest (`content_sha256`) of the model that an update started from."""
    encoding: str = "full"
    """How tensors are written: `full`, or the name of a delta codec (see `facility.exchange.checkpoints.delta`)."""
    dtypes: dict[str, int] = field(default_factory=dict)
    """Number of tensors per safetensors dtype."""
    parameters: int = 0
    """Number of tensor elements in all."""
    files: dict[str, FileEntry] = field(default_factory=dict)
    """Every file except the manifest, by path relative to the directory."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Room for named additions that a reader may ignore."""
    format: int = FORMAT
    """Format version; a reader refuses a newer one."""

    @property
    def content_sha256(self) -> str:
        """Digest over the tensor files' digests: equal when the weights are the same bytes in the same files."""
        return content_digest({name: e.digest for name, e in self.files.items() if name.endswith(".safetensors")})


def content_digest(files: Mapping[str, str]) -> str:
    """The sha256 of the tensor files' digests, in the order of their names: identifies the content."""
    lines = [f"{digest}  {name}\n" for name, digest in sorted(files.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def bytes_of(manifest: Manifest, folders: Collection[str] = ()) -> int:
    """Of all files that it names, or of those in `folders` of the directory."""
    files = manifest.files.items()
    return sum(entry.size for name, entry in files if not folders or name.partition("/")[0] in folders)


def run_of(manifest: Manifest) -> str:
    """The run that a model or update belongs to; empty: made by a version or a caller that has no runs."""
    return str(manifest.extra.get(RUN) or "")


def with_run(directory: Path, run: str) -> None:
    """Write `run` into the manifest of `directory`; nothing for an empty one."""
    if run and run_of(read_manifest(directory)) != run:
        with_extra(directory, RUN, run)


def with_extra(directory: Path, key: str, value: Any) -> None:
    """Write one entry of `extra` into the manifest of `directory`."""
    manifest = read_manifest(directory)
    store_manifest(directory, dataclasses.replace(manifest, extra=manifest.extra | {key: value}))


def with_head(directory: Path, log: str) -> None:
    """Write the head of the audit log `log` into the manifest of `directory`; nothing where there is none."""
    if log and (found := head_digest(Path(log))):
        with_extra(directory, HEAD, found)


def sha256_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal. Raises `OSError`."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def streamed_digest(directory: Path, manifest: Manifest, name: str) -> StreamedDigest:
    """The digest of the file `name`, of the kind that the manifest states, from its bytes as they go by."""
    entry = manifest.files[name]
    return StreamedDigest(Path(directory) / name, entry.size, entry.begin())


def _sha256_of_all(paths: Sequence[Path]) -> list[str]:
    """The sha256 of each file, two at a time: hashing takes longer than reading."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(sha256_of, paths))


def _files(directory: Path) -> list[Path]:
    found = []
    for path in sorted(directory.rglob("*")):
        if path.is_symlink():
            target = real_path(path)
            if not target.is_file():
                raise ManifestError(f"{path} is a symbolic link to {target}, which is not a regular file")
        if path.is_file() and path.relative_to(directory).as_posix() not in (NAME, SIGNATURE):
            found.append(path)
    return found


def write_manifest(directory: Path, manifest: Manifest, known: Mapping[str, str] | None = None) -> Manifest:
    """Hash every file below `directory` and write `manifest.json` last; returns the manifest with `files` filled.

    `known`: digests of files that were hashed as they were written (a `Checksum` in a STATE), by path relative
    to the directory.
    """
    directory, known = Path(directory), known or {}
    found = {path.relative_to(directory).as_posix(): path for path in _files(directory)}
    unknown = [name for name in found if name not in known]
    digests = dict(zip(unknown, _sha256_of_all([found[name] for name in unknown]), strict=True)) | dict(known)
    files = {name: FileEntry.of(digests[name], path.stat().st_size) for name, path in found.items()}
    manifest = dataclasses.replace(manifest, files=files)
    store_manifest(directory, manifest)
    return manifest


def store_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json` as it is, hashing nothing."""
    described = dataclasses.asdict(manifest)
    for entry in described["files"].values():
        del entry["sha256" if entry["checksum"] else "checksum"]
    write_json(Path(directory) / NAME, described)


def read_manifest(directory: Path) -> Manifest:
    """Read `manifest.json` without checking the files. Raises `ManifestError` when absent, unreadable or newer."""
    path = Path(directory) / NAME
    if not os.path.isdir(directory) and not os.path.lexists(path):
        fault = "is a file" if os.path.lexists(directory) else "is not there"
        raise ManifestError(f"{directory} {fault}: expected a directory with a {NAME}")
    raw = read_json(path, most_bytes=MOST_BYTES)
    if type(raw.get("format")) is not int:
        raise ManifestError(f"{path} is not a manifest: expected an object with an integer `format`")
    found = Fields(raw=raw, where=str(path)).of_format(FORMAT).only_of(Manifest)
    dtypes = found.inside("dtypes", 100)
    kind = found.text("kind")
    return Manifest(
        kind=kind,
        federation=found.text("federation"),
        round=found.whole("round", most=MOST_ROUNDS),
        facility=None if raw.get("facility") is None else found.text("facility"),
        base_sha256=None if raw.get("base_sha256") is None else found.digest("base_sha256"),
        encoding=found.text("encoding", "full"),
        dtypes={name: dtypes.whole(name) for name in dtypes.raw},
        parameters=found.whole("parameters", 0),
        files={name: _entry(name, entry, path, kind) for name, entry in found.mapping("files", MOST_FILES).items()},
        extra=found.mapping("extra", MOST_EXTRA),
        format=found.whole("format", least=1),
    )


def _entry(name: str, raw: Any, path: Path, kind: str) -> FileEntry:
    if not isinstance(raw, dict):
        raise ManifestError(f"{path} says of {name!r:.80} nothing of its size and sha256")
    if kind == STATE and "checksum" in raw:
        found = Fields(raw=raw, where=f"{path}: {name:.80}").only(("checksum", "size"))
        if not is_checksum(stated := found.text("checksum")):
            raise ManifestError(
                f"{path}: the checksum of {name!r:.80} is {stated!r:.80}, expected xxh3-128: and 32 digits"
            )
        return FileEntry(checksum=stated, size=found.whole("size"))
    found = Fields(raw=raw, where=f"{path}: {name:.80}").only(("sha256", "size"))
    return FileEntry(sha256=found.digest("sha256"), size=found.whole("size"))


def verify_manifest(directory: Path, *, later: Collection[str] = ()) -> Manifest:
    """Read the manifest and check every file's presence, size and digest; no other file may lie beside them.

    `later`: files whose digest the caller makes as it reads them, and compares by `check_digest` before what it read
    is of any effect. Raises `ManifestError` naming the first file that differs.
    """
    directory = Path(directory)
    manifest = read_manifest(directory)
    present = {path.relative_to(directory).as_posix() for path in _files(directory)}
    for name, entry in sorted(manifest.files.items()):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ManifestError(f"{directory}/{NAME} names {name!r}, which is outside the directory")
        if name not in present:
            advice = ": the transfer is incomplete; send the directory again"
            raise ManifestError(f"{directory}/{name} is missing", advice)
        size = (directory / name).stat().st_size
        if size != entry.size:
            found = f"{directory}/{name} has {size} bytes, expected {entry.size}: truncated or altered"
            raise ManifestError(found, SEND_AGAIN)
    names = sorted(manifest.files.keys() - set(later))
    with ThreadPoolExecutor(2) as pool:
        digests = pool.map(lambda name: streamed_digest(directory, manifest, name).finish(), names)
        for name, digest in zip(names, digests, strict=True):
            check_digest(directory, manifest, name, digest)
    if surplus := sorted(present - set(manifest.files)):
        raise ManifestError(f"{directory} holds files that its manifest does not name: {surplus[:5]}")
    return manifest


def check_digest(directory: Path, manifest: Manifest, name: str, digest: str) -> None:
    """Raise `ManifestError` unless the manifest gives the file `name` this digest."""
    entry = manifest.files[name]
    if digest != entry.digest:
        kind = "checksum" if entry.checksum else "sha256"
        raise ManifestError(f"{directory}/{name} has another {kind} than its manifest says: altered", SEND_AGAIN)


def tensor_files(manifest: Manifest, folders: Collection[str] = ("",)) -> list[str]:
    """Files of tensors that lie in one of these folders of a directory."""
    return [n for n in manifest.files if n.endswith(".safetensors") and n.rpartition("/")[0] in folders]


def manifest_if_any(directory: Path) -> Manifest | None:
    """The manifest in `directory` itself (no symbolic link); None where there is none that can be read."""
    path = Path(directory) / NAME
    if not path.is_file() or path.is_symlink():
        return None
    try:
        return read_manifest(directory)
    except ManifestError:
        return None
