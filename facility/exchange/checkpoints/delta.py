"""Send the difference to a model that the receiver already holds, instead of the whole model.

    encode_update(full=update, reference=model, out=message, encoding="delta-int8", residual_out=lost)
    decode_update(message, reference=model, out=update)

A message is a directory like the full one, with `delta.safetensors` in place of the tensors and a manifest that names
the encoding and the digest of the reference model. Tensor `NAME` becomes `NAME::q`, `NAME::scale` and so on, flat, as
its codec defines (`facility.exchange.checkpoints.codecs`); a tensor equal to the reference's is absent; one that is not
floating point and differs is `NAME::raw`. Both sides must hold the same reference: another digest is an error that says
to send in full, never a silent fallback.

What the codec loses is kept at the sender (`residual_out`): error feedback, F. Seide et al., Interspeech 2014, and
S. P. Karimireddy et al., ICML 2019, arXiv 1901.09847. Here it is no addition to the next difference: a
facility's next training begins from it (`facility.rounds.smaller`). With a codec that fades (`DeltaCodec.fading`) it is
one (`ahead`), times that factor, and training begins from a share of it alone.

An update is decoded to float32, so that half precision does not take away what the codec carried; the coordinator does
that as it averages, mostly without a decoded file (`facility.exchange.checkpoints.encoded`). A model is decoded to the
reference's dtypes, and its message states the digest of the result, which the receiver checks.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from facility.exchange.checkpoints import magnitudes
from facility.exchange.checkpoints.checkpoint import FLOATS, Checkpoint, TensorEntry, in_file_order, open_checkpoint
from facility.exchange.checkpoints.codecs import PART
from facility.exchange.checkpoints.companions import copy_companions
from facility.exchange.checkpoints.delta_decoding import decode_update
from facility.exchange.checkpoints.delta_parts import FILE, as_bytes, raw_ranges
from facility.exchange.checkpoints.differences import NOTHING, Left, read_differences, steps_of
from facility.exchange.checkpoints.floats import Array, widen
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.checkpoints.step_norms import NAME as NORMS
from facility.exchange.checkpoints.step_norms import StepNorms
from facility.exchange.checkpoints.twins import Twins, surplus_of
from facility.exchange.checkpoints.writer import Planned, TensorWriter, layout_like
from facility.exchange.delta_codecs import Codec, declared_codec, load_codec
from facility.exchange.errors import CheckpointError, ConfigurationError
from facility.exchange.files.checksum import Checksum
from facility.exchange.files.durable import new_directory
from facility.exchange.files.links import link_files
from facility.exchange.messages.manifest import NAME, Manifest, read_manifest, write_manifest
from facility.exchange.messages.settings import SPARSE_DENSITY

STRIDE = 16
"""A codec that selects takes its threshold, of a large tensor, from a sample of the first values of each part."""

PROBE = 256
"""Values of each part that are compared first, where it is asked whether a tensor differs at all."""


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What encoding did."""

    message_bytes: int
    """Bytes of the message's tensor file."""
    parameters: int
    """Elements of all floating-point tensors, sent or not."""
    unchanged: int
    """Tensors that did not travel."""
    relative_error: float
    """Root mean square of what was lost, over that of the differences."""
    residual_checksums: dict[str, str] = field(default_factory=dict)
    """Of the residual's files by name, made as they were written."""
    message_sha256: dict[str, str] = field(default_factory=dict)
    """Of the message's tensor file."""


def encode_update(
    *,
    full: Path,
    reference: Path,
    out: Path,
    encoding: str,
    values: Path | None = None,
    residual_out: Path | None = None,
    density: float = SPARSE_DENSITY,
    patterns: Patterns | None = None,
    norms: bool = False,
    ahead: Path | None = None,
    taken: float = 0.0,
) -> Encoded:
    """Write the message `out` for the directory `full`; `out` and `residual_out` must not exist.

    `values`: a checkpoint with the same tensors in more precision than `full` (a float32 master). `density`: share of
    the values that a codec sends that selects. A tensor may be absent from `full` when `patterns` say that it is not
    federated. `norms`: write step_norms.json beside the message of an update, of the step that it decodes to. `ahead`:
    the `residual_out` of the message before, of a codec that fades; `full` was trained from the share `taken` of it.
    Raises `ConfigurationError` where a codec that is for models alone is to encode an update.
    """
    if declared_codec(encoding).lossless and read_manifest(full).kind == "update":
        raise ConfigurationError(f"encoding {encoding!r} is for models alone, and {full} is an update")
    manifest, old = read_manifest(full), open_checkpoint(reference)
    new = _same_names(open_checkpoint(values or full), open_checkpoint(full), old, patterns or Patterns())
    with ExitStack() as stack:
        directory = stack.enter_context(new_directory(out))
        kept = stack.enter_context(new_directory(residual_out)) if residual_out is not None else None
        left = open_checkpoint(ahead) if ahead is not None else None
        done = write_tensors(
            directory, kept, old=old, new=new, encoding=encoding, density=density, norms=norms, ahead=left, taken=taken
        )
        copy_companions(Path(full), directory, leave=(NORMS,))
        write_manifest(directory, as_message(manifest, encoding, reference), done.message_sha256)
    return done


def as_message(manifest: Manifest, encoding: str, reference: Path) -> Manifest:
    """The manifest of a full directory, of its message to the model `reference`; without its files."""
    extra = manifest.extra | {"reference_sha256": read_manifest(reference).content_sha256}
    return dataclasses.replace(manifest, encoding=encoding, files={}, extra=extra)


def write_tensors(
    directory: Path,
    kept: Path | None,
    *,
    old: Checkpoint,
    new: Mapping[str, TensorEntry],
    encoding: str,
    density: float = SPARSE_DENSITY,
    norms: bool = False,
    ahead: Checkpoint | None = None,
    taken: float = 0.0,
) -> Encoded:
    """Write a message's tensors to `directory`, and what it loses to the directory `kept`, which both exist.

    `new`: by the names of `old`, stored or in memory; read part by part, in the order in which `old` lies. `norms`:
    write step_norms.json, too. `ahead`: what the message before left, of a codec that fades; `new` was trained from the
    share `taken` of it.
    """
    if not 0 < density <= 1:
        raise ConfigurationError(f"density is {density}, expected more than 0 and at most 1")
    codec, declared = load_codec(encoding), declared_codec(encoding)
    if codec.of_bits and (kept is not None or norms):
        raise ConfigurationError(f"encoding {encoding!r} is for models alone, which leave no residual and no norms")
    left = NOTHING
    if ahead is not None and declared.fading:
        left = Left(tensors=ahead.tensors, fading=declared.fading - taken)
    sending = _plan(codec, old, new, density if declared.selects else None, left)
    with ExitStack() as files:
        writer = TensorWriter(directory, {FILE: sending.planned}, {"format": "pt"}, hashed=True, as_listed=True)
        message = files.enter_context(writer)
        residual = None
        if kept is not None:
            kinds = {name: "F32" for name in sending.moved if old.tensors[name].dtype in FLOATS}
            if kinds:
                residual = files.enter_context(
                    TensorWriter(kept, layout_like(old, kinds), hashed=True, digest=Checksum)
                )
        with StepNorms(old) as steps:
            squared, lost = _write(codec, sending, old, new, message, residual, steps if norms else None, left)
            steps.unmoved(old.tensors[name] for name in old.tensors.keys() - set(sending.moved))
        digests, made = residual.digests() if residual is not None else {}, message.digests()
    if norms:
        steps.write(directory)
    return Encoded(
        message_bytes=(directory / FILE).stat().st_size,
        parameters=sum(entry.elements for entry in old.tensors.values() if entry.dtype in FLOATS),
        unchanged=len(old.tensors) - len(sending.sent),
        relative_error=math.sqrt(lost / squared) if squared else 0.0,
        residual_checksums=digests,
        message_sha256=made,
    )


def _write(
    codec: Codec,
    sending: _Sending,
    old: Checkpoint,
    new: Mapping[str, TensorEntry],
    message: TensorWriter,
    residual: TensorWriter | None,
    norms: StepNorms | None,
    left: Left,
) -> tuple[float, float]:
    """Write what the plan says, part by part; returns the sums of squares of the differences and of what was lost."""
    squared = lost = 0.0
    for name in sending.moved:
        entry = old.tensors[name]
        if entry.dtype not in FLOATS:
            for offset, content in raw_ranges(new[name]):
                message.write(f"{name}::raw", offset, content)
            continue
        places = {suffix: 0 for suffix, _, _ in codec.fields(0, 0)}
        for start, base, step, length in steps_of(codec, entry, new[name], left):
            squared += length
            missed, arrives = step, None
            if name in sending.sent:
                stored = codec.encode(step, sending.limit)
                for suffix, array in stored.items():
                    message.write(f"{name}::{suffix}", places[suffix], as_bytes(array))
                    places[suffix] += array.nbytes
                arrives = codec.decode(stored, len(step))
                missed = step - arrives
                assert not codec.of_bits or not missed.any(), f"a lossless codec loses values of {name}"
            if norms is not None:
                _take_norm(norms, entry, start, base, arrives)
            lost += float(np.vdot(missed, missed))
            if residual is not None:
                residual.write(name, start * 4, as_bytes(missed))
    return squared, lost


def _take_norm(norms: StepNorms, entry: TensorEntry, start: int, base: Array, arrives: Array | None) -> None:
    """Add the step of a part of an update as it is decoded: the difference that arrives, added to the reference."""
    values = np.empty(len(base), np.float64 if entry.dtype == "F64" else np.float32)
    widen(base, entry.dtype, values)
    if arrives is not None:
        np.add(values, arrives, out=values)
    norms.take(entry.name, "F64" if entry.dtype == "F64" else "F32", start, values, base)


def encode_model(
    *,
    model: Path,
    reference: Path,
    out: Path,
    decoded: Path,
    encoding: str,
    master: Path | None = None,
    density: float = SPARSE_DENSITY,
) -> Encoded:
    """The coordinator's direction: the message `out`, and `decoded`, the model as every receiver will hold it.

    `decoded`, not `model`, is what updates start from and the reference of the next message; so what the codec loses
    is part of the next difference without a residual of its own. `master`: the float32 checkpoint behind `model`.
    """
    with ExitStack() as stack:
        temporary = stack.enter_context(_scratch(out))
        result = encode_update(
            full=model, reference=reference, out=temporary, encoding=encoding, values=master, density=density
        )
        made = decode_update(temporary, reference=reference, out=decoded)
        with new_directory(out) as directory:
            link_files(temporary, directory)
            (directory / NAME).unlink()
            sent = read_manifest(temporary)
            write_manifest(
                directory,
                dataclasses.replace(sent, files={}, extra=sent.extra | {"decoded_sha256": made.content_sha256}),
            )
    return result


class _scratch:
    """A sibling name that is removed in the end."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path).with_name(f".{Path(path).name}.message")

    def __enter__(self) -> Path:
        shutil.rmtree(self.path, ignore_errors=True)
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _same_names(
    values: Checkpoint, full: Checkpoint, reference: Checkpoint, patterns: Patterns
) -> dict[str, TensorEntry]:
    """The tensors to encode by the reference's names; those that `values` lacks come from `full`.

    A tied weight that one of them alone stores twice is one weight under both names, as where updates are averaged.
    """
    found: dict[str, TensorEntry] = {}
    twins = Twins(reference)
    for name, entry in reference.tensors.items():
        candidate = values.tensors.get(name) or full.tensors.get(name)
        if candidate is None:
            candidate = twins.stored_in(full, name) if patterns.federated(name) else entry
        if candidate is None or candidate.shape != entry.shape:
            shape = "absent" if candidate is None else list(candidate.shape)
            raise CheckpointError(
                f"{full.directory}: tensor {name!r} is {shape}, the reference has {list(entry.shape)}: send it in full"
            )
        found[name] = candidate
    if surplus := sorted(surplus_of(full, reference)):
        raise CheckpointError(f"{full.directory}: tensors {surplus[:3]} are not in the reference: send it in full")
    return found


@dataclass(frozen=True, kw_only=True)
class _Sending:
    """What a message will hold."""

    planned: list[Planned]
    moved: list[str]
    """Tensors that differ."""
    sent: set[str]
    """Those of them of which the message holds something."""
    limit: float
    """A codec that selects sends magnitudes from here on."""


def _plan(codec: Codec, old: Checkpoint, new: Mapping[str, TensorEntry], density: float | None, left: Left) -> _Sending:
    """Which tensors differ, and what is stored of each. `density`: of a codec that selects by magnitude."""
    limit = _limit(old, new, density) if density is not None else 0.0
    planned: list[Planned] = []
    moved: list[str] = []
    for entry in in_file_order(old):
        name = entry.name
        if entry.dtype not in FLOATS:
            if new[name].dtype != entry.dtype:
                raise CheckpointError(
                    f"tensor {name!r} is {new[name].dtype}, the reference has {entry.dtype}: send it in full"
                )
            if any(a != b for (_, a), (_, b) in zip(raw_ranges(entry), raw_ranges(new[name]), strict=True)):
                planned.append(Planned(name=f"{name}::raw", dtype=entry.dtype, shape=entry.shape))
                moved.append(name)
            continue
        codes, differs = 0, codec.selection is None and _differs_early(entry, new[name], left)
        for _, _, step, length in steps_of(codec, entry, new[name], left) if not differs else ():
            differs = differs or length > 0 or bool(step.any())  # squares of the tiniest values vanish
            if codec.selection is not None:
                codes += codec.selection.length(step, limit)
            elif differs:
                break
        if differs:
            moved.append(name)
        if codes if codec.selection is not None else differs:
            for suffix, dtype, length in codec.fields(entry.elements, codes):
                planned.append(Planned(name=f"{name}::{suffix}", dtype=dtype, shape=(length,)))
    sent = {tensor.name.rpartition("::")[0] for tensor in planned}
    return _Sending(planned=planned, moved=moved, sent=sent, limit=limit)


def _differs_early(old: TensorEntry, new: TensorEntry, left: Left) -> bool:
    """Whether the first `PROBE` values of some part differ: of what was trained, the first part shows it without the
    rest being read once more."""
    return any(length > 0 for _, _, _, length in read_differences(old, new, PROBE, left))


def _limit(old: Checkpoint, new: Mapping[str, TensorEntry], density: float) -> float:
    """The magnitude that a share `density` of all tensors' values reaches."""
    counts = np.zeros(magnitudes.BINS)
    for name, entry in old.tensors.items():
        if entry.dtype in FLOATS:
            width, seen = PART if entry.elements <= PART else PART // STRIDE, np.zeros(magnitudes.BINS, np.int64)
            for _, _, step, _ in read_differences(entry, new[name], width):
                seen += magnitudes.histogram(step)
            counts += seen * (entry.elements / max(1, int(seen.sum())))
    return magnitudes.threshold_for(counts, density, smallest=1)
