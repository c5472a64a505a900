"""Whether an update may take part in a round: whole, unaltered, of this round and model, and finite."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from coordinator.aggregation.adapter_fit import check_adapters, check_as_agreed
from coordinator.aggregation.matching import match_tensors
from facility.exchange.checkpoints.checkpoint import (
    FLOATS,
    Checkpoint,
    Opened,
    TensorEntry,
    expect_tensors,
    open_checkpoint,
)
from facility.exchange.checkpoints.companions import EXECUTABLE
from facility.exchange.checkpoints.delta_parts import FILE
from facility.exchange.checkpoints.encoded import open_message, stored_of, values_of
from facility.exchange.checkpoints.floats import widen
from facility.exchange.checkpoints.moments import StoredMoments, has_moments, shapes_in
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.checkpoints.running_statistics import VARIANCE
from facility.exchange.checkpoints.second_moments import Factors, has_factors, read_factors
from facility.exchange.delta_codecs import CODECS
from facility.exchange.errors import CheckpointError, ManifestError, UpdateRefused
from facility.exchange.files.bounded import real_path
from facility.exchange.files.streamed_digest import StreamedDigest
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.manifest import (
    Manifest,
    check_digest,
    read_manifest,
    sha256_of,
    streamed_digest,
    tensor_files,
    verify_manifest,
)
from facility.exchange.messages.report import read_failure, read_report

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "preprocessor_config.json")


def check_update(
    directory: Path,
    base: Checkpoint,
    base_manifest: Manifest | None,
    facility: str,
    round: int,
    *,
    maximum_staleness: int = 0,
    patterns: Patterns | None = None,
    adapters: LoraSettings | None = None,
    content: bool = True,
) -> None:
    """Raise `UpdateRefused` naming `facility` unless `directory` is its usable update of `round` to `base`.

    `adapters`: what the facilities were asked to train; None: not known. Reads every byte of a tensor once, for the
    manifest and for finiteness; none without `content`, where the pass that averages it finds out.
    """
    directory = Path(directory)
    if failure := (read_failure(directory) if directory.is_dir() else None):
        raise UpdateRefused(facility, f"it reports a failure: {failure.reason}")
    try:
        check_files(directory, facility)
        later = tensor_files(read_manifest(directory))
        manifest = verify_manifest(directory, later=later)
        if manifest.encoding in CODECS.names() and later != [FILE]:
            raise UpdateRefused(facility, f"it holds tensors in {sorted(later)}, expected {FILE} alone")
        check_identity(manifest, base_manifest, facility, round, maximum_staleness=maximum_staleness)
        report = read_report(directory)
        if (report.facility, report.round) != (facility, manifest.round):
            raise UpdateRefused(
                facility,
                f"report.json is of {report.facility!r} and round {report.round}, the manifest of round "
                f"{manifest.round}",
            )
        update = open_update(directory, manifest, base.directory, base_manifest)
        patterns = patterns or Patterns()
        if adapters is not None and (manifest.encoding == "lora") != (adapters.rank > 0):
            wanted = "adapters" if adapters.rank else "a whole model"
            raise UpdateRefused(facility, f"its encoding is {manifest.encoding!r}, expected {wanted} as agreed")
        if manifest.encoding == "lora":
            check_adapters(base, update, facility, adapters)
            if adapters is not None:
                check_as_agreed(base, update, adapters, facility)
            matched = dict(update.tensors)
        else:
            matched = match_tensors(base, update, facility, federated=patterns.federated)
        check_tokenizer(base.directory, directory, facility)
        read_second_moments(directory, update, facility)
        check_moments(directory, update, facility)
        check_variances(matched, facility)
        if content:
            check_content(directory, manifest, later, matched, facility)
    except (UpdateRefused, CheckpointError) as error:
        check_unaltered(directory, facility)
        raise error if isinstance(error, UpdateRefused) else UpdateRefused(facility, str(error)) from None


def open_update(directory: Path, manifest: Manifest | None, base: Path, base_manifest: Manifest | None) -> Checkpoint:
    """The tensors of an update as it came: whole, or a difference to the model in the directory `base`.

    Raises `CheckpointError`.
    """
    if manifest is not None and base_manifest is not None and manifest.encoding in CODECS.names():
        return open_message(directory, manifest, base, base_manifest)
    return open_checkpoint(directory)


def check_unaltered(directory: Path, facility: str) -> None:
    """Refuse an update that is not what its manifest says: whatever else is wrong with it may come from that."""
    try:
        verify_manifest(directory)
    except ManifestError as error:
        raise UpdateRefused(facility, str(error)) from None


def check_content(
    directory: Path, manifest: Manifest, names: Sequence[str], matched: dict[str, TensorEntry], facility: str
) -> None:
    """Compare the files `names` with the manifest, and refuse values that are not finite, in one reading."""
    hashed = {directory / name: streamed_digest(directory, manifest, name) for name in names}
    check_finite(matched, facility, hashed)
    for name in names:
        check_digest(directory, manifest, name, hashed[directory / name].finish())


def check_moments(directory: Path, update: Checkpoint, facility: str) -> None:
    """Read the moments of an update that travel value by value. Raises `UpdateRefused` for what no optimizer has."""
    if not has_moments(directory):
        return
    try:
        StoredMoments(directory, shapes_in(update)).check()
    except CheckpointError as error:
        raise UpdateRefused(facility, f"its moments cannot be used: {error}") from None


def read_second_moments(directory: Path, update: Checkpoint, facility: str) -> tuple[dict[str, Factors], float] | None:
    """The second moments of an update and the steps they have seen; None where it brings none.

    Raises `UpdateRefused` where they do not fit the update's own tensors, or are what no optimizer has.
    """
    if not has_factors(directory):
        return None
    try:
        found = read_factors(directory, {name: entry.shape for name, entry in update.tensors.items()})
    except CheckpointError as error:
        raise UpdateRefused(facility, f"its second moments cannot be used: {error}") from None
    if odd := next((name for name, one in found[0].items() if not one.agree), None):
        raise UpdateRefused(facility, f"row and column means of its second moments of {odd!r} are not of one matrix")
    return found


def check_files(directory: Path, facility: str) -> None:
    """Refuse files that run code when loaded, links that leave the directory, and anything that is not a file."""
    if not directory.is_dir():
        raise UpdateRefused(facility, f"{directory} is not a directory: the update never arrived")
    home = real_path(directory)
    for folder, folders, names in os.walk(directory):
        for name in sorted(folders + names):
            path = Path(folder) / name
            shown = path.relative_to(directory).as_posix()
            if path.is_symlink() and not real_path(path).is_relative_to(home):
                raise UpdateRefused(
                    facility, f"{shown!r} is a symbolic link out of the directory, to {real_path(path)}"
                )
            if not path.is_file() and not path.is_dir():
                raise UpdateRefused(facility, f"{shown!r} is neither a file nor a directory")
            if path.suffix.lower() in EXECUTABLE:
                raise UpdateRefused(
                    facility, f"{shown!r} may run code when it is loaded; updates hold safetensors only"
                )


def check_identity(
    manifest: Manifest, base_manifest: Manifest | None, facility: str, round: int, *, maximum_staleness: int = 0
) -> None:
    """Refuse a manifest of another kind, facility, federation, round or base model."""
    if manifest.kind != "update":
        raise UpdateRefused(facility, f"the manifest is of a {manifest.kind!r}, expected an 'update'")
    if manifest.facility != facility:
        raise UpdateRefused(facility, f"the manifest is of facility {manifest.facility!r}")
    late = round - manifest.round
    if not 0 <= late <= maximum_staleness:
        limit = f" or up to {maximum_staleness} earlier" if maximum_staleness else ""
        raise UpdateRefused(facility, f"it is of round {manifest.round}, expected round {round}{limit}")
    if base_manifest is None:
        return
    if manifest.federation != base_manifest.federation:
        raise UpdateRefused(
            facility, f"it is of federation {manifest.federation!r}, expected {base_manifest.federation!r}"
        )
    if not late and manifest.base_sha256 is not None and manifest.base_sha256 != base_manifest.content_sha256:
        raise UpdateRefused(
            facility,
            f"it started from another model (sha256 {manifest.base_sha256[:12]}) than this round's "
            f"({base_manifest.content_sha256[:12]})",
        )


def check_tokenizer(base: Path, update: Path, facility: str) -> None:
    """Refuse an update that carries another tokenizer than the base: its rows of the embedding mean other tokens."""
    for name in TOKENIZER_FILES:
        one, two = Path(base) / name, Path(update) / name
        if not (one.is_file() and two.is_file()):
            continue
        if one.stat().st_size != two.stat().st_size or sha256_of(one) != sha256_of(two):
            raise UpdateRefused(
                facility, f"its {name} differs from the base model's: rows of its embedding may mean other tokens"
            )


def check_variances(entries: Mapping[str, TensorEntry], facility: str) -> None:
    """Refuse running variances below zero: a mean below zero would be a model that no facility can use."""
    with Opened() as read:
        for name, entry in entries.items():
            if not name.endswith(VARIANCE) or entry.dtype not in FLOATS:
                continue
            for raw in values_of(entry, read):
                values = np.empty(len(raw), np.float64)
                widen(raw, entry.dtype, values)
                if bool((values < 0).any()):
                    raise UpdateRefused(facility, f"tensor {name!r} holds a variance below zero")


def check_finite(
    entries: dict[str, TensorEntry], facility: str, hashed: Mapping[Path, StreamedDigest] | None = None
) -> None:
    """Refuse NaN and infinity in any floating-point tensor, in the order on disk; `hashed` takes what is read.

    Refuses encoded tensors that cannot be decoded, too.
    """
    floats = [(name, entry) for name, entry in entries.items() if entry.dtype in FLOATS]
    floats.sort(key=lambda item: min((one.file, one.start) for one in stored_of(item[1]) or [item[1]]))
    expect_tensors(hashed or {}, [one for _, entry in floats for one in stored_of(entry)])
    with Opened() as opened:

        def read(entry: TensorEntry, offset: int, buffer: memoryview) -> None:
            opened(entry, offset, buffer)
            if hashed and entry.file in hashed:
                hashed[entry.file].feed(entry.start + offset, buffer)

        for name, entry in floats:
            try:
                finite = all(_finite(values, entry.dtype) for values in values_of(entry, read))
            except CheckpointError as error:
                raise UpdateRefused(facility, str(error)) from None
            if not finite:
                raise UpdateRefused(facility, f"tensor {name!r} holds NaN or infinity")


def _finite(raw: np.ndarray, dtype: str) -> bool:
    if dtype == "BF16":  # an exponent of all ones is NaN or infinity
        return not bool(((raw & 0x7F80) == 0x7F80).any())
    return bool(np.isfinite(raw).all())
