"""Averaging messages gives the bits of decoding them to files first, reads each once, and writes nothing of them."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.aggregation import marked_messages
from coordinator.aggregation.reading import WIDEST, TensorReader
from coordinator.aggregation.record import RoundRecord
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.sources import DamagedUpdate
from coordinator.aggregation.steps import Steps
from coordinator.aggregation.streams import Files
from coordinator.aggregation.work import Malformed
from coordinator.steps.expectation import Expected
from coordinator.steps.receive import receive
from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.checkpoint import Opened, TensorEntry, open_checkpoint
from facility.exchange.checkpoints.codecs import PART, sparseloco
from facility.exchange.checkpoints.delta import FILE, decode_update, encode_update
from facility.exchange.checkpoints.encoded import EncodedTensor, add_difference, open_message, values_of
from facility.exchange.checkpoints.step_norms import NAME as NORMS
from facility.exchange.errors import CheckpointError, UpdateRefused
from facility.exchange.files import streamed_digest
from facility.exchange.messages.manifest import read_manifest, write_manifest
from tests.aggregation import make
from tests.aggregation.make import aggregate
from tests.aggregation.test_delta import rewritten
from tests.aggregation.test_reads_once import SLACK, read_by, size
from tests.aggregation.test_stated_norms import alike, resealed, short_spans, without_statements
from tests.cases import slow_but
from tests.made_once import made_once

SHAPES: dict[str, tuple[int, ...]] = {"b.odd": (777,), "a.large": (36, 16831), "c.part": (65536,), "d.one": (1,)}
"""One is more than a span, as `short_spans` leaves it, one fills a part, two fill no block."""
LARGE = SHAPES | {"a.large": (2100, 2003)}
"""Of which a message that is read twice is more than what else is read."""
ENCODINGS = ("delta-int8", "delta-int4", "sparse", "sparseloco")
MEAN = AggregationSettings(rule="mean+nesterov")
__all__ = ["short_spans"]


def a_round(
    root: Path,
    count: int,
    encoding: str,
    dtype: torch.dtype = torch.bfloat16,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
) -> tuple[Path, list[Path]]:
    """A model in several files and `count` messages to it that state their norms; one tensor does not move."""
    kind, by = (
        f"{str(dtype).removeprefix('torch.')}-{'large' if shapes is LARGE else 'short'}",
        "numpy" if native.library() is None else "compiled",
    )
    made = made_once(root, f"model-{kind}", lambda place: _model(place, dtype, shapes))
    base, messages = shutil.copytree(made / "base", root / "base"), []
    for i in range(count):
        made = made_once(
            root, f"{encoding}-{kind}-{by}-{i}", lambda place, i=i: _message(place, base, i, encoding, shapes)
        )
        messages.append(shutil.copytree(made / "message", root / f"message{i}"))
    return base, messages


def _model(place: Path, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]]) -> None:
    still = {"e.still": torch.ones(1000, dtype=dtype), "f.n": torch.arange(3)}
    make.model(place / "base", make.random_tensors(0, shapes, dtype) | still, shard_bytes=1_000_000)


def _message(place: Path, base: Path, i: int, encoding: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    start = make.read_all(base)
    moved = {"e.still": start["e.still"].float(), "f.n": start["f.n"]}
    moved |= make.moved({name: start[name].float() for name in shapes}, i + 1, 1e-3 * (1 + 0.1 * i))
    full = make.update(place / "full", moved, base=base, facility=f"f{i}", tokens=100 + i)
    encode_update(full=full, reference=base, out=place / "message", encoding=encoding, norms=True)
    shutil.rmtree(full)


def decoded(root: Path, base: Path, messages: list[Path]) -> list[Path]:
    found = []
    for message in messages:
        found.append(root / f"decoded-{message.name}")
        decode_update(message, reference=base, out=found[-1], norms=True)
    return found


def combined(root: Path, base: Path, updates: list[Path], **more: Any) -> tuple[dict[str, str], RoundRecord]:
    more = {"settings": MEAN, "verify_base": True, "verify_updates": True} | more
    root.mkdir()
    record = aggregate(base=base, updates=updates, out=root / "model", state_out=root / "state", **more)
    return {part: read_manifest(root / part).content_sha256 for part in ("model", "state")}, record


def same(root: Path, base: Path, messages: list[Path], **more: Any) -> tuple[RoundRecord, RoundRecord]:
    """The records from messages and from decoded updates, of equal models, states and rounds."""
    there, record = combined(root / "from-messages", base, messages, **more)
    wanted, plain = combined(root / "from-files", base, decoded(root, base, messages), **more)
    assert there == wanted
    assert alike(record) == alike(plain)
    return record, plain


@pytest.mark.parametrize(
    ("encoding", "dtype", "threads"),
    [
        pytest.param("delta-int8", torch.bfloat16, 2, marks=pytest.mark.slow),
        ("delta-int8", torch.float32, 1),
        pytest.param("delta-int4", torch.float32, 1, marks=pytest.mark.slow),
        pytest.param("delta-int4", torch.float16, 2, marks=pytest.mark.slow),
        ("sparse", torch.float16, 2),
        pytest.param("sparse", torch.float32, 1, marks=pytest.mark.slow),
        pytest.param("sparseloco", torch.bfloat16, 2, marks=pytest.mark.slow),
        ("sparseloco", torch.float32, 1),
    ],
    ids=str,
)
def test_the_model_is_that_of_decoded_updates_to_the_last_bit(
    tmp_path: Path, encoding: str, dtype: torch.dtype, threads: int, caplog: pytest.LogCaptureFixture
):
    base, messages = a_round(tmp_path, 3, encoding, dtype)
    with caplog.at_level(logging.WARNING):
        record, plain = same(tmp_path, base, messages, threads=threads)
    assert record.bytes_read < 0.6 * plain.bytes_read
    assert min(record.details["clip_factors"].values()) < 1
    assert "states a squared norm" not in caplog.text, "what the encoder states is what the pass measures"


@pytest.mark.parametrize(
    ("encoding", "rule"),
    [("delta-int8", "krum"), ("sparseloco", "median"), pytest.param("sparse", "krum", marks=pytest.mark.slow)]
    + [pytest.param("delta-int8", rule, marks=pytest.mark.slow) for rule in ("median", "ties+fedadam", "mean")]
    + [pytest.param("sparse", rule, marks=pytest.mark.slow) for rule in ("median", "ties+fedadam", "mean")],
)
def test_whatever_the_rule_and_its_passes(tmp_path: Path, encoding: str, rule: str):
    base, messages = a_round(tmp_path, 4, encoding)
    same(tmp_path, base, messages, settings=AggregationSettings(rule=rule))


@pytest.mark.parametrize("more", [{"accumulate": "float64"}, {"statistics": "off"}, {"exclude": ["a.*"]}], ids=str)
def test_whatever_is_summed_how(tmp_path: Path, more: dict[str, Any]):
    base, messages = a_round(tmp_path, 2, "delta-int8")
    same(tmp_path, base, messages, settings=AggregationSettings(rule="mean", **more))


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_without_the_compiled_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str):
    monkeypatch.setattr(native, "library", lambda: None)
    base, messages = a_round(tmp_path, 3, encoding)
    assert not (messages[0] / NORMS).exists()
    same(tmp_path, base, messages)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_parts_are_decoded_in_any_order(tmp_path: Path, encoding: str):
    """As threads take them; also the parts of a codec whose places follow from the parts before."""
    base, (message,) = a_round(tmp_path, 1, encoding)
    (whole,) = decoded(tmp_path, base, [message])
    wanted = make.read_all(whole)
    tensors = open_message(message, read_manifest(message), base, read_manifest(base)).tensors

    entry = tensors["a.large"]
    assert isinstance(entry, EncodedTensor)
    old = make.read_all(base)["a.large"].float().numpy().reshape(-1)
    with Opened() as read:
        for start in (5 * 65536, 3 * 65536, 0, 8 * 65536):
            values = old[start : start + 3 * 65536].copy()
            add_difference(entry, start, values, read)
            assert np.array_equal(values, wanted["a.large"].numpy().reshape(-1)[start : start + 3 * 65536])
        for name, one in tensors.items():
            if name != "f.n":
                assert np.array_equal(np.concatenate(list(values_of(one, read))), wanted[name].numpy().reshape(-1))


@pytest.mark.parametrize("encoding", slow_but(["delta-int8", "sparseloco"], ENCODINGS))
def test_what_an_encoder_states_of_its_step_is_what_two_passes_measure(tmp_path: Path, encoding: str):
    base, messages = a_round(tmp_path, 3, encoding)
    stated, record = combined(tmp_path / "stated", base, messages)
    without_statements(messages)
    measured, plain = combined(tmp_path / "measured", base, messages)
    assert stated == measured and alike(record) == alike(plain)
    assert record.bytes_read * 1.9 < plain.bytes_read or native.library() is None


@pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc/self/io")
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_message_is_read_once_and_nothing_of_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
):
    """Also where nothing fits into what a digest may hold back but the scales of a part."""
    base, messages = a_round(tmp_path, 3, encoding, shapes=LARGE)
    monkeypatch.setattr(streamed_digest, "MOST_WAITING", 2 << 20)

    def written() -> int:
        return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])

    for message in messages:
        assert read_by(lambda message=message: receive_it(message, base, tmp_path)) < SLACK
    before = written()
    found = read_by(lambda: combined(tmp_path / "next", base, messages, threads=1))
    needed = sum(map(size, (base, *messages)))
    assert needed <= found <= needed + SLACK
    made = size(tmp_path / "next" / "model") + size(tmp_path / "next" / "state")
    assert made <= written() - before <= made + SLACK


def receive_it(message: Path, base: Path, root: Path, *, taken: bool = True) -> str:
    told = receive(
        message,
        Expected(
            facility=read_manifest(message).facility or "",
            round=0,
            model=base,
            evaluation=False,
            settings=MEAN,
            content=False,
            encoded=True,
        ),
        decoded=root / "not-made",
    )
    assert (told is None) == taken, told
    assert not (root / "not-made").exists()
    return "" if told is None else told.reason


def odd(message: Path, out: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The message with its stored tensors changed, signed off by its sender."""
    rewritten(message, out, change)
    for name in ("config.json", "report.json", NORMS):
        shutil.copyfile(message / name, out / name)
    return resealed(out)


def _flipped(arrays: dict[str, Any]) -> None:
    """A scale that is not finite; of a codec that selects, one value more than it has codes for."""
    name = next(n for n in ("a.large::scale", "a.large::kept") if n in arrays)
    dtype, shape, raw = arrays[name]
    raw = raw.copy()
    if name.endswith("scale"):
        raw[:4] = 0xFF
    else:
        place = int(np.flatnonzero(raw[:8000] != 0xFF)[0])
        raw[place : place + 2] = 0xFF
    arrays[name] = (dtype, shape, raw)


def _past_the_end(arrays: dict[str, Any]) -> None:
    dtype, shape, raw = arrays["b.odd::kept"]
    raw = raw.copy()
    raw[-1] |= 0x80
    arrays["b.odd::kept"] = (dtype, shape, raw)


@pytest.mark.parametrize(
    ("encoding", "change"),
    [("delta-int8", _flipped), ("delta-int4", _flipped), ("sparse", _flipped), ("sparse", _past_the_end)],
)
def test_what_no_encoder_writes_is_found_by_the_pass_and_blamed_on_its_sender(
    tmp_path: Path, encoding: str, change: Callable[[dict[str, Any]], None]
):
    base, messages = a_round(tmp_path, 3, encoding)
    bad = [messages[0], odd(messages[1], tmp_path / "bad", change), messages[2]]
    receive_it(bad[1], base, tmp_path)
    with pytest.raises(DamagedUpdate, match="malformed|too short|too long") as refusal:
        combined(tmp_path / "one", base, bad, drop_refused=True)
    assert refusal.value.facility == "f1"
    with pytest.raises(UpdateRefused, match="malformed|too short|too long") as refused:
        combined(tmp_path / "two", base, bad, verify_updates=False)
    assert refused.value.facility == "f1"
    for name in ("one", "two"):
        assert not list((tmp_path / name).iterdir())


def _places(change: str) -> Callable[[dict[str, Any]], None]:
    """The last chunk of a tensor gets one place more, or its places do not increase."""

    def changed(arrays: dict[str, Any]) -> None:
        dtype, shape, raw = arrays["a.large::code"]
        raw, elements = raw.copy(), 36 * 16831
        code = raw[-sum(sparseloco.streams_of(elements % 4096)) :]
        high, low, _, _ = sparseloco.streams_of(elements % 4096)
        if change == "more":
            code[high - 2] = int(code[high - 2]) | int(code[high - 2]) + 1  # sets its lowest bit of those that are not
        else:
            code[:high] = 0
            code[:11] = 0xFF  # all in the first 32
            code[high : high + low] = 0
        arrays["a.large::code"] = (dtype, shape, raw)

    return changed


@pytest.mark.parametrize("verified", [True, False], ids=["hashed", "read at once"])
@pytest.mark.parametrize(("change", "said"), [("more", "other than 88 places"), ("alike", "do not increase")])
def test_places_that_no_encoder_writes_in_one_of_several_messages(
    tmp_path: Path, change: str, said: str, verified: bool
):
    base, messages = a_round(tmp_path, 6, "sparseloco")
    bad = [*messages[:4], odd(messages[4], tmp_path / "bad", _places(change)), messages[5]]
    with pytest.raises(UpdateRefused, match=f"tensor 'a.large' is malformed: .*{said}") as refusal:
        combined(tmp_path / "one", base, bad, verify_updates=verified)
    assert refusal.value.facility == "f4"


INFINITE = {"delta-int8": b"\x00\x00\x80\x7f", "delta-int4": b"\x80\xff"}
"""As a scale is stored."""


@pytest.mark.parametrize(
    "verified", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["hashed", "read at once"]
)
@pytest.mark.parametrize(
    ("encoding", "scale"),
    [*INFINITE.items(), ("delta-int8", np.float32(-1e-5).tobytes()), ("delta-int8", np.float32(np.nan).tobytes())],
)
def test_one_scale_among_all_of_several_messages(tmp_path: Path, encoding: str, scale: bytes, verified: bool):
    """The last of a tensor, in the last but one message."""
    base, messages = a_round(tmp_path, 6, encoding)

    def change(arrays: dict[str, Any]) -> None:
        dtype, shape, raw = arrays["a.large::scale"]
        raw = raw.copy()
        raw[-len(scale) :] = np.frombuffer(scale, np.uint8)
        arrays["a.large::scale"] = (dtype, shape, raw)

    bad = [*messages[:4], odd(messages[4], tmp_path / "bad", change), messages[5]]
    with pytest.raises(UpdateRefused, match="tensor 'a.large' is malformed: a scale is") as refusal:
        combined(tmp_path / "one", base, bad, verify_updates=verified)
    assert refusal.value.facility == "f4"


@pytest.mark.parametrize("encoding", slow_but(["delta-int8"], ["delta-int8", "delta-int4"]))
def test_zero_scales_of_either_sign_are_zero(tmp_path: Path, encoding: str):
    base, messages = a_round(tmp_path, 4, encoding)

    def change(arrays: dict[str, Any]) -> None:
        dtype, shape, raw = arrays["a.large::scale"]
        raw = np.zeros_like(raw)
        raw[{"delta-int8": 3, "delta-int4": 1}[encoding] :: 8] = 0x80
        arrays["a.large::scale"] = (dtype, shape, raw)

    odd_ones = [odd(message, tmp_path / f"odd-{message.name}", change) for message in messages]
    for one in odd_ones:
        (one / NORMS).unlink()
        resealed(one)
    same(tmp_path, base, odd_ones)


@pytest.mark.parametrize("verified", [True, False], ids=["hashed", "read at once"])
def test_one_level_among_all_of_several_messages(tmp_path: Path, verified: bool):
    """The last of a tensor, in the last but one message."""
    base, messages = a_round(tmp_path, 6, "sparse")

    def change(arrays: dict[str, Any]) -> None:
        dtype, shape, raw = arrays["a.large::level"]
        raw = raw.copy()
        raw[-4:] = np.frombuffer(np.float32(np.inf).tobytes(), np.uint8)
        arrays["a.large::level"] = (dtype, shape, raw)

    bad = [*messages[:4], odd(messages[4], tmp_path / "bad", change), messages[5]]
    with pytest.raises(UpdateRefused, match="tensor 'a.large' is malformed: a level is") as refusal:
        combined(tmp_path / "one", base, bad, verify_updates=verified)
    assert refusal.value.facility == "f4"


@pytest.mark.parametrize("part", [0, 3], ids=["first part", "later part"])
def test_where_a_part_begins_is_known_without_any_other_thread(tmp_path: Path, part: int, monkeypatch):
    """As where the thread that has the parts before is held up: what they hold is counted."""
    monkeypatch.setattr(marked_messages, "PATIENCE", 0.01)
    base, messages = a_round(tmp_path, 2, "sparse")
    opened = [dict(open_message(one, read_manifest(one), base, read_manifest(base)).tensors) for one in messages]
    sources, count = [open_checkpoint(base).tensors, *opened], 2 * PART
    buffers = [np.empty(count * WIDEST, np.uint8).data for _ in sources]
    with Files() as files:
        for source in sources:
            files.open(source.values())
        reader = TensorReader("a.large", sources, files, buffers, as_stored=True)
        arrays = reader.read(part * PART, count)
        assert reader.dtypes[1:] == ["SPARSE", "SPARSE"]
        places, records = reader.addresses(PART, len(sources))
        rows = Steps(2, PART, "float32")
        _, found, _ = rows.take(
            [array[PART:count] for array in arrays if array is not None],
            reader.dtypes,
            gram=None,
            coefficients=None,
            rows=True,
            places=places,
            scales=records,
        )
    assert found is not None
    for row, source in zip(found, opened, strict=True):
        with Opened() as read:
            values = np.concatenate(list(values_of(source["a.large"], read)))
        old = np.fromfile(entry_of(base).file, np.uint16, entry_of(base).elements, offset=entry_of(base).start)
        wide = (old.astype(np.uint32) << 16).view(np.float32)
        begin = (part + 1) * PART
        assert np.array_equal(row, (values - wide)[begin : begin + PART])


def entry_of(base: Path) -> TensorEntry:
    return open_checkpoint(base).tensors["a.large"]


@pytest.mark.parametrize(
    ("encoding", "suffix"),
    [(encoding, suffix) for encoding in ("delta-int8", "delta-int4") for suffix in ("q", "scale")]
    + [("sparse", suffix) for suffix in ("kept", "level", "code")]
    + [("sparseloco", suffix) for suffix in ("code", "level")],
)
@pytest.mark.parametrize("fault", ["shorter than its layout", "file that ends early"])
def test_no_message_as_it_is_stored_is_read_past_its_end(tmp_path: Path, encoding: str, suffix: str, fault: str):
    """Also where nothing has checked the layout before the reader does."""
    base, (message,) = a_round(tmp_path, 1, encoding)
    entries = dict(open_message(message, read_manifest(message), base, read_manifest(base)).tensors)
    entry = entries["a.large"]
    assert isinstance(entry, EncodedTensor)
    stored = entry.fields[suffix]
    if fault == "shorter than its layout":
        less = 1000 if suffix == "code" and encoding == "sparse" else stored.size - 2  # the first part has more codes
        shorter = dataclasses.replace(stored, size=less, shape=(less,))
        entries["a.large"] = dataclasses.replace(entry, fields=dict(entry.fields) | {suffix: shorter})
    said = "too short" if (encoding, suffix, fault[0]) == ("sparse", "code", "s") else "expected"
    elements, sources = 1 << 16, [open_checkpoint(base).tensors, entries]
    buffers = [np.empty(elements * WIDEST, np.uint8).data for _ in sources]
    with Files() as files:
        for source in sources:
            files.open(source.values())
        with pytest.raises(Malformed, match=said) as refusal:
            reader = TensorReader("a.large", sources, files, buffers, as_stored=True)
            if fault == "file that ends early":
                os.truncate(message / FILE, stored.start + 8)
            reader.read(0, elements)
        assert refusal.value.update == 0


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("place", [-3, -9_000, 200], ids=["end", "middle", "header"])
def test_a_message_that_was_altered_on_its_way_is_refused_as_altered(tmp_path: Path, encoding: str, place: int):
    base, messages = a_round(tmp_path, 3, encoding)
    with open(messages[1] / FILE, "r+b") as file:
        file.seek(place, 2 if place < 0 else 0)
        file.write(b"\xff\xff\xff")
    if place > 0:
        assert "another sha256" in receive_it(messages[1], base, tmp_path, taken=False)
        return
    with pytest.raises(DamagedUpdate, match="another sha256") as refusal:
        combined(tmp_path / "one", base, messages, drop_refused=True)
    assert refusal.value.facility == "f1"


def test_layout_and_reference_are_checked_on_arrival(tmp_path: Path):
    base, (message,) = a_round(tmp_path, 1, "delta-int8")

    def stranger(arrays: dict[str, Any]) -> None:
        arrays["x::q"] = ("I8", (3,), np.zeros(3, np.uint8))

    strange = odd(message, tmp_path / "strange", stranger)
    assert "belong to no tensor of the reference" in receive_it(strange, base, tmp_path, taken=False)
    (strange / FILE).unlink()
    for name in (FILE, "model.safetensors"):
        shutil.copyfile(message / FILE, strange / name)
    assert "expected delta.safetensors alone" in receive_it(resealed(strange), base, tmp_path, taken=False)
    other = make.model(tmp_path / "other", make.moved(make.read_all(base), 9))
    assert "it started from another model" in receive_it(message, other, tmp_path, taken=False)
    told = dataclasses.replace(read_manifest(message), files={}, base_sha256=None)
    write_manifest(message, told)  # what it is a difference to is checked whatever else it says
    assert "send it in full" in receive_it(message, other, tmp_path, taken=False)


def test_an_encoded_tensor_is_never_read_as_it_is_stored(tmp_path: Path):
    """Code that does not know of encodings gets an error, not the bytes of something else."""
    base, (message,) = a_round(tmp_path, 1, "delta-int8")
    opened = open_message(message, read_manifest(message), base, read_manifest(base))
    assert opened.dtypes() == {"F32": 5, "I64": 1} and opened.parameters == open_checkpoint(base).parameters
    with pytest.raises(CheckpointError, match="truncated"):
        opened.read("b.odd")
