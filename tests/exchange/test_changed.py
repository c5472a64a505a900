"""The codec `changed`: every bit of the model arrives, few changes are few bytes, what no encoder writes is refused."""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coordinator.config.settings import SendingSettings
from coordinator.steps.send import make_message
from facility.exchange.checkpoints import delta, native
from facility.exchange.checkpoints.checkpoint import open_checkpoint, read_header
from facility.exchange.checkpoints.codecs import PART, changed
from facility.exchange.checkpoints.writer import Planned, TensorWriter
from facility.exchange.delta_codecs import LOSSLESS_MOST, declared_codec
from facility.exchange.errors import CheckpointError, ConfigurationError
from facility.exchange.messages.manifest import Manifest, read_manifest, verify_manifest, write_manifest
from facility.exchange.messages.settings import TrainingSettings
from tests.aggregation import make

SIGNED = {"BF16": np.int16, "F16": np.int16, "F32": np.int32, "F64": np.int64}
TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
EXPONENTS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F64": 0x7FF0000000000000}


def model(directory: Path, tensors: dict[str, np.ndarray], dtype: str, number: int = 0) -> Path:
    """A model whose tensors have these bits."""
    return make.model(
        directory,
        {name: torch.from_numpy(bits.copy()).view(TORCH[dtype]) for name, bits in tensors.items()},
        round=number,
    )


def bits_of(directory: Path) -> dict[str, bytes]:
    opened = open_checkpoint(directory)
    return {
        name: entry.file.read_bytes()[entry.start : entry.start + entry.size] for name, entry in opened.tensors.items()
    }


def arrives(path: Path, old: Path, new: Path) -> int:
    """Encode and decode `new`; returns the bytes of the message's tensors."""
    done = delta.encode_model(
        model=new, reference=old, out=path / "message", decoded=path / "decoded", encoding="changed"
    )
    delta.decode_update(path / "message", reference=old, out=path / "received")
    assert bits_of(path / "received") == bits_of(path / "decoded") == bits_of(new)
    assert done.relative_error == 0 and not list(path.glob(".*"))
    verify_manifest(path / "received")
    return sum(entry.size for entry in read_header(path / "message" / delta.FILE)[0].values())


def weights(count: int, seed: int = 0) -> np.ndarray:
    """Bits of normally distributed bfloat16 numbers."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02
    return values.bfloat16().view(torch.int16).numpy()


def moved(bits: np.ndarray, share: float, seed: int = 1) -> np.ndarray:
    """A share of the values some units in the last place away."""
    generator = np.random.default_rng(seed)
    units = generator.integers(1, 4, len(bits)) * generator.choice([-1, 1], len(bits))
    return (bits + np.where(generator.random(len(bits)) < share, units, 0)).astype(bits.dtype)


def finite(dtype: str):
    """Bits of finite numbers of all kinds: any, zeros of both signs, subnormals and the largest."""
    exponent, signed = EXPONENTS[dtype], SIGNED[dtype]
    top = int(np.iinfo(signed).min)
    special = [0, top, 1, top + 1, exponent - 1, top + exponent - 1]
    positive = st.integers(0, exponent - 1)
    return st.one_of(st.sampled_from(special), positive, positive.map(lambda bits: top + bits))


@pytest.mark.parametrize("dtype", SIGNED)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_finite_bits_become_any_others(dtype: str, data, tmp_path_factory: pytest.TempPathFactory) -> None:
    path, count = tmp_path_factory.mktemp("pair"), data.draw(st.integers(1, 12))
    some = arrays(SIGNED[dtype], count, elements=finite(dtype))
    old, new = data.draw(some), data.draw(some)
    arrives(path, model(path / "old", {"w": old}, dtype), model(path / "new", {"w": new}, dtype))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_finite_half_precision_number_from_far_away_ones(
    dtype: str, compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All numbers, each from ones that are larger and smaller by many orders: float32 differences would lose some."""
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    every = np.arange(1 << 16).astype(np.uint16).view(np.int16)
    every = every[(every & EXPONENTS[dtype]) != EXPONENTS[dtype]]
    shuffled = np.random.default_rng(0).permutation(every)
    old, new = {"w": every, "same": every}, {"w": shuffled, "same": every}
    arrives(tmp_path, model(tmp_path / "old", old, dtype), model(tmp_path / "new", new, dtype))
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = (torch.from_numpy(bits.copy()).view(TORCH[dtype]) for bits in (every, shuffled))
        lost = (a.float() + (b.float() - a.float())).to(TORCH[dtype])
    assert not torch.equal(lost.view(torch.int16), b.view(torch.int16))  # why the codec is not one of differences


def test_a_zero_that_changes_its_sign_alone_is_sent(tmp_path: Path) -> None:
    old, new = np.zeros(PART + 5, np.int16), np.zeros(PART + 5, np.int16)
    new[PART + 3] = -(1 << 15)
    size = arrives(tmp_path, model(tmp_path / "old", {"w": old}, "BF16"), model(tmp_path / "new", {"w": new}, "BF16"))
    assert 0 < size <= 2 * 4 * changed.SIZES + 300
    same = arrives(tmp_path_of(tmp_path, "same"), tmp_path / "new", model(tmp_path / "again", {"w": new}, "BF16"))
    assert same == 0  # an unchanged tensor is absent


def tmp_path_of(path: Path, name: str) -> Path:
    (path / name).mkdir()
    return path / name


@pytest.mark.parametrize(("share", "most"), [(0.0005, 0.0015), (0.01, 0.0085), (0.06, 0.036), (0.5, 0.16), (1.0, 0.19)])
def test_bytes_of_a_share_of_changed_values(share: float, most: float, tmp_path: Path) -> None:
    """Of the bfloat16 model's bytes; 6 % of the values, a few units in the last place, at random places: 3.2 %."""
    bits = weights(20 * PART + 777)
    old, new = (
        model(tmp_path / name, {"w": one}, "BF16") for name, one in (("old", bits), ("new", moved(bits, share)))
    )
    assert arrives(tmp_path, old, new) <= most * 2 * len(bits)


def test_its_prediction_is_the_size_at_six_percent() -> None:
    parts = weights(8 * PART).reshape(8, PART), moved(weights(8 * PART), 0.06).reshape(8, PART)
    found = sum(array.nbytes for old, new in zip(*parts, strict=True) for array in changed.encode(new - old).values())
    assert found == pytest.approx(declared_codec("changed").message_bytes(8 * PART, 0.3), rel=0.02)


@settings(max_examples=30, deadline=None)
@given(
    share=st.floats(0, 1),
    width=st.sampled_from(list(SIGNED)),
    seed=st.integers(0, 9),
    count=st.sampled_from([4000, PART - 1, PART]),
)
def test_no_part_is_larger_than_its_bound(share: float, width: str, seed: int, count: int) -> None:
    generator, signed = np.random.default_rng(seed), SIGNED[width]
    values = generator.integers(np.iinfo(signed).min, np.iinfo(signed).max, count, signed, endpoint=True)
    values[generator.random(count) >= share] = 0
    stored = changed.encode(values)
    assert sum(array.nbytes for array in stored.values()) <= LOSSLESS_MOST * values.nbytes
    assert changed.stored_bytes(stored, count) == len(stored["data"]) == changed.selected_bytes(values, 0)
    assert np.array_equal(changed.decode(stored, count), values)


def test_by_hand() -> None:
    values = np.zeros(600, np.int16)
    values[[0, 1, 300, 555, 599]] = [1, -1, 127, -128, 300]
    stored = changed.encode(values)
    size, data = stored["size"].tolist(), stored["data"].tobytes()
    assert size[0] == 5 and size[4:] == [0] * 6
    ends = np.cumsum(size[1:4]).tolist()
    streams = [zlib.decompress(data[a:b], -15) for a, b in zip([0, *ends], ends, strict=False)]
    # 298 unchanged values before 300: 255 and 43; 254 before 555. Folded: 2, 1, 254, 255, 600 = 88 + 2 * 256
    assert streams == [bytes([0, 0, 255, 43, 254, 43]), bytes([2, 1, 254, 255, 88]), bytes([0, 0, 0, 0, 2])]


def stored_of(changes: int, skips: bytes, *planes: bytes) -> dict[str, np.ndarray]:
    """A part with these streams."""
    streams = [changed._deflated(np.frombuffer(stream, np.uint8)) for stream in (skips, *planes)]
    size = np.zeros(changed.SIZES, np.int32)
    size[: 1 + len(streams)] = [changes, *map(len, streams)]
    return {"size": size, "data": np.frombuffer(b"".join(streams), np.uint8)}


def test_the_streams_of_the_hostile_ones_are_well_formed_where_they_are_not_odd() -> None:
    assert np.flatnonzero(changed.decode(stored_of(2, b"\x03\x05", b"\x01\x02"), 10)).tolist() == [3, 9]


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (stored_of(2, b"\x03\x06", b"\x01\x02"), "past the end"),
        (stored_of(2, b"\x03\xff", b"\x01\x02"), "places are not as many"),
        (stored_of(1, b"\x03\xff", b"\x01"), "places are not as many"),
        (stored_of(2, b"\x03\x05", b"\x01"), "too few differences"),
        (stored_of(2, b"\x03\x05", b"\x01\x02\x03"), "does not have the bytes"),
        (stored_of(2, b"\x03\x05", bytes(30_000)), "does not have the bytes"),
        (stored_of(2, bytes(20_000), b"\x01\x02"), "does not have the bytes"),
        (stored_of(2, b"\x03\x05", b"\x01\x00"), "difference is zero"),
        (stored_of(2, b"\x03\x05", b"\x01\x02", b"\x00\x00"), "all zero"),
        (stored_of(2, b"\x03\x05"), "sizes are not"),
        (stored_of(0, b"\x03\x05", b"\x01\x02"), "sizes are not"),
        (stored_of(11, b"\x03\x05", b"\x01\x02"), "sizes are not"),
        (stored_of(-2, b"\x03\x05", b"\x01\x02"), "sizes are not"),
    ],
)
def test_a_part_that_no_encoder_writes_is_refused(stored: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        changed.decode(stored, 10)


@pytest.mark.parametrize(
    ("place", "number", "words"),
    [(1, -3, "out of range"), (1, 2**31 - 1, "out of range"), (4, 3, "sizes are not"), (2, 0, "sizes are not")],
)
def test_sizes_that_no_encoder_writes_are_refused_before_anything_is_read(place: int, number: int, words: str) -> None:
    stored = stored_of(2, b"\x03\x05", b"\x01\x02")
    stored["size"][place] = number
    with pytest.raises(ValueError, match=words):
        changed.stored_bytes(stored, 10)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_altered_bytes_decode_to_a_part_or_are_refused(data) -> None:
    values = moved(np.zeros(3000, np.int16), 0.1)
    stored = {name: array.copy() for name, array in changed.encode(values).items()}
    raw = stored[data.draw(st.sampled_from(["size", "data"]))].view(np.uint8)
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = changed.decode(stored, 3000)
    except ValueError:
        return
    assert found.shape == (3000,) and np.count_nonzero(found) == stored["size"][0]


def test_a_cut_stream_and_bytes_after_it_are_refused() -> None:
    values = moved(np.zeros(3000, np.int16), 0.1)
    for change in (-1, 1):
        stored = changed.encode(values)
        data = stored["data"].tobytes()
        stored["data"] = np.frombuffer(data[:-1] if change < 0 else data + b"\x00", np.uint8)
        with pytest.raises(ValueError, match="as long as their sizes"):
            changed.decode(stored, 3000)
        stored["size"][2] += change
        with pytest.raises(ValueError, match="bytes that it should"):
            changed.decode(stored, 3000)


def forged(message: Path, out: Path, size: np.ndarray, data: np.ndarray) -> Path:
    out.mkdir()
    planned = [
        Planned(name="w::size", dtype="I32", shape=size.shape),
        Planned(name="w::data", dtype="U8", shape=data.shape),
    ]
    with TensorWriter(out, {delta.FILE: planned}) as writer:
        writer.write("w::size", 0, memoryview(size.tobytes()))
        writer.write("w::data", 0, memoryview(data.tobytes()))
    write_manifest(out, dataclasses.replace(read_manifest(message), files={}))
    return out


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (np.int64(1 << 15), "more bits than BF16"),
        (np.int64(EXPONENTS["BF16"]), "NaN or infinity"),
    ],
)
def test_a_message_that_makes_no_number_is_refused(step, words: str, tmp_path: Path) -> None:
    old, new = np.zeros(9, np.int16), np.ones(9, np.int16)
    start = model(tmp_path / "old", {"w": old}, "BF16")
    delta.encode_update(
        full=model(tmp_path / "new", {"w": new}, "BF16"), reference=start, out=tmp_path / "m", encoding="changed"
    )
    stored = changed.encode(np.array([0, step] + [0] * 7))
    with pytest.raises(CheckpointError, match=words):
        delta.decode_update(forged(tmp_path / "m", tmp_path / "bad", **stored), reference=start, out=tmp_path / "out")
    stored["data"] = np.concatenate([stored["data"], np.zeros(1, np.uint8)])
    with pytest.raises(CheckpointError, match="too long"):
        delta.decode_update(forged(tmp_path / "m", tmp_path / "worse", **stored), reference=start, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_exact_is_refused(tmp_path: Path) -> None:
    start = model(tmp_path / "old", {"w": weights(500)}, "BF16")
    wide = make.model(tmp_path / "wide", {"w": torch.ones(500)})
    with pytest.raises(CheckpointError, match="is F32, the reference has BF16: send it in full"):
        delta.encode_update(full=wide, reference=start, out=tmp_path / "m", encoding="changed")
    infinite = model(tmp_path / "infinite", {"w": np.full(500, EXPONENTS["BF16"], np.int16)}, "BF16")
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        delta.encode_update(full=infinite, reference=start, out=tmp_path / "m", encoding="changed")
    assert not (tmp_path / "m").exists()


def test_updates_are_not_sent_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="encoding is 'changed', which is for models alone .*sending.encoding"):
        TrainingSettings(encoding="changed", export_dtype="float32")
    start = make.model(tmp_path / "old", {"w": torch.ones(500)})
    update = make.update(tmp_path / "update", {"w": torch.full((500,), 1.5)}, base=start, facility="a")
    with pytest.raises(ConfigurationError, match="for models alone, and .*update is an update"):
        delta.encode_update(full=update, reference=start, out=tmp_path / "m", encoding="changed")
    after = make.model(tmp_path / "new", {"w": torch.full((500,), 1.5)})
    with pytest.raises(ConfigurationError, match="leave no residual"):
        delta.encode_update(
            full=after, reference=start, out=tmp_path / "m", encoding="changed", residual_out=tmp_path / "r"
        )
    delta.encode_update(full=after, reference=start, out=tmp_path / "m", encoding="changed")
    manifest = dataclasses.replace(read_manifest(tmp_path / "m"), kind="update", facility="a", files={})
    write_manifest(tmp_path / "m", manifest)
    with pytest.raises(CheckpointError, match="an update in encoding 'changed', which is for models alone"):
        delta.decode_update(tmp_path / "m", reference=start, out=tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_rounds_model_stays_as_it_is_and_so_does_the_master(dtype: torch.dtype, tmp_path: Path) -> None:
    """The message is of the half-precision model, whatever the float32 master has besides."""
    tensors = make.random_tensors(0, {"a": (300, 400), "b": (7,)}, dtype) | {"steps": torch.arange(4)}
    reference = make.model(tmp_path / "before", tensors)
    truth = make.moved({name: tensors[name].float() for name in ("a", "b")}, 1, 1e-6)
    after = {name: tensor.to(dtype) for name, tensor in truth.items()} | {"steps": torch.arange(4) + 1}
    directory = tmp_path / "round"
    before = bits_of(make.model(directory / "model", after, round=1))
    master = bits_of(make.checkpoint(directory / "state" / "master", truth))
    write_manifest(directory / "state", Manifest(kind="state", federation="test", round=1))
    told = make_message(directory, reference, SendingSettings(encoding="changed"))
    assert told["encoding"] == "changed" and told["relative_error"] == 0
    assert bits_of(directory / "model") == before and bits_of(directory / "state" / "master") == master
    assert read_manifest(directory / "state").extra["model_sha256"] == read_manifest(directory / "model").content_sha256
    delta.decode_update(directory / "message", reference=reference, out=tmp_path / "received")
    assert bits_of(tmp_path / "received") == before and not (directory / "whole").exists()
