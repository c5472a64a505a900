"""Smaller messages: size, error, error feedback, proof of the reference, and refusal of what is malformed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from facility.exchange.checkpoints import delta
from facility.exchange.checkpoints.checkpoint import open_checkpoint, read_header
from facility.exchange.checkpoints.codecs import int4, int8, sparse
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.checkpoints.writer import Planned, TensorWriter
from facility.exchange.errors import CheckpointError
from facility.exchange.messages.manifest import read_manifest, write_manifest
from tests.aggregation import make

SHAPES = {"a.weight": (500, 300), "b.weight": (70_001,), "c.bias": (7,), "d.empty": (0,)}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A bfloat16 model and a float32 update that moved by about 1e-4; `frozen` did not, `steps` is not a float."""
    start = make.random_tensors(0, SHAPES, torch.bfloat16)
    start |= {"frozen": torch.ones(999, dtype=torch.bfloat16), "steps": torch.arange(5)}
    base = make.model(tmp_path / "base", start)
    moved = make.moved({name: t.float() for name, t in start.items() if name in SHAPES}, 1, 1e-4)
    moved |= {"frozen": start["frozen"].float(), "steps": start["steps"]}
    return base, make.update(tmp_path / "update", moved, base=base, facility="alpha")


def error_of(decoded: Path, update: Path, base: Path) -> float:
    """Root mean square error over that of the update's step."""
    got, wanted, start = make.read_all(decoded), make.read_all(update), make.read_all(base)
    lost = sum(float(((got[n] - wanted[n]).double() ** 2).sum()) for n in SHAPES)
    step = sum(float(((wanted[n] - start[n].float()).double() ** 2).sum()) for n in SHAPES)
    return (lost / step) ** 0.5


@pytest.mark.parametrize(
    ("encoding", "most_bytes", "most_error"),
    [("delta-int8", 0.52, 0.01), ("delta-int4", 0.27, 0.1), ("sparse", 0.26, 0.15), ("sparseloco", 0.0136, 0.93)],
)
def test_size_and_error(pair, tmp_path: Path, encoding: str, most_bytes: float, most_error: float):
    base, update = pair
    result = delta.encode_update(full=update, reference=base, out=tmp_path / "message", encoding=encoding)
    assert result.unchanged == 3  # frozen, steps, and the empty one
    sent = open_checkpoint(base)
    moved = sum(sent.tensors[name].size for name in SHAPES)
    header = read_header(tmp_path / "message" / delta.FILE)[0]
    assert sum(entry.size for entry in header.values()) <= most_bytes * moved
    manifest = delta.decode_update(tmp_path / "message", reference=base, out=tmp_path / "decoded")
    assert (manifest.encoding, manifest.kind, manifest.facility) == ("full", "update", "alpha")
    assert error_of(tmp_path / "decoded", update, base) <= most_error
    assert result.relative_error == pytest.approx(error_of(tmp_path / "decoded", update, base), rel=1e-2)
    assert torch.equal(make.read_all(tmp_path / "decoded")["frozen"], torch.ones(999))
    assert (tmp_path / "decoded" / "report.json").read_bytes() == (update / "report.json").read_bytes()


def bytes_read_by_calls() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel's counters are Linux's")
def test_model_and_update_are_read_once_to_be_encoded(tmp_path: Path):
    start = make.random_tensors(0, {f"w{number}": (512, 400) for number in range(8)}, torch.bfloat16)
    base = make.model(tmp_path / "base", start)
    moved = make.moved({name: t.float() for name, t in start.items()}, 1, 1e-4)
    update = make.update(tmp_path / "update", moved, base=base, facility="alpha")
    before = bytes_read_by_calls()
    delta.encode_update(full=update, reference=base, out=tmp_path / "message", encoding="delta-int8")
    needed = open_checkpoint(base).bytes + open_checkpoint(update).bytes
    assert needed <= bytes_read_by_calls() - before <= 1.05 * needed


@pytest.mark.parametrize("place", [0, 255, 256, 70_000, 204_799])
def test_one_value_that_differs_is_sent_wherever_it_is(tmp_path: Path, place: int):
    start = {"w": torch.ones(512, 400, dtype=torch.bfloat16), "same": torch.ones(300, dtype=torch.bfloat16)}
    base = make.model(tmp_path / "base", start)
    after = {name: tensor.float() for name, tensor in start.items()}
    after["w"].view(-1)[place] += 0.5
    update = make.update(tmp_path / "update", after, base=base, facility="alpha")
    done = delta.encode_update(full=update, reference=base, out=tmp_path / "message", encoding="delta-int8")
    assert done.unchanged == 1
    delta.decode_update(tmp_path / "message", reference=base, out=tmp_path / "decoded")
    got = make.read_all(tmp_path / "decoded")["w"].view(-1)
    assert got[place] == pytest.approx(1.5, abs=1e-2) and int((got != 1).sum()) == 1


def test_codecs_by_hand():
    values = np.array([127, -63.5, 1, 0], np.float32)
    sent = int8.encode(values)
    assert sent["q"].tolist() == [127, -64, 1, 0] and sent["scale"].tolist() == [1]
    assert int8.decode(sent, 4).tolist() == [127, -64, 1, 0]
    sent = int4.encode(np.array([-8, 7, 2.4, 0, 3], np.float32))
    # scale 1; steps -8, 7, 2, 0, 3 are stored as 0, 15, 10, 8, 11, two to a byte, low half first
    assert sent["q"].tolist() == [0 + 16 * 15, 10 + 16 * 8, 11 + 16 * 8]
    assert int4.decode(sent, 5).tolist() == [-8, 7, 2, 0, 3]
    assert int4.decode(int4.encode(np.array([8, -7, 1], np.float32)), 3).tolist() == [8, -7, 1]  # the scale is -1
    sent = sparse.encode(np.array([0, 5, -1, -8, 5], np.float32), 5)
    # bits 1, 3 and 4; 5 is the first of eight magnitudes and 8 the last, with a sign: codes 0, 8 + 7 and 0
    assert sent["kept"].tolist() == [2 + 8 + 16] and sent["code"].tolist() == [0 + 16 * 15, 0]
    assert sent["level"].tolist() == [5, 0, 0, 0, 0, 0, 0, 8]
    assert sparse.decode(sent, 5).tolist() == [0, 5, 0, -8, 5]


@pytest.mark.parametrize("codec", [int8, int4])
def test_a_block_of_zeros_and_of_tiny_values(codec):
    for value in (0.0, 1e-42):
        assert not codec.decode(codec.encode(np.full(300, value, np.float32)), 300).any()


@pytest.mark.parametrize("encoding", ["delta-int4", "sparse"])
def test_nothing_is_lost_over_rounds_that_go_on_from_what_was_not_sent(tmp_path: Path, encoding: str):
    base = make.model(tmp_path / "base", {"w": torch.zeros(5000)})
    step = make.random_tensors(3, {"w": (5000,)}, torch.float32, 1e-3)["w"]
    total, rest, rounds = torch.zeros(5000), torch.zeros(5000), 12
    for number in range(rounds):
        update = make.update(tmp_path / f"u{number}", {"w": step + rest}, base=base, facility="alpha")
        after = tmp_path / f"residual{number}"
        delta.encode_update(
            full=update, reference=base, out=tmp_path / f"m{number}", encoding=encoding, density=0.2, residual_out=after
        )
        delta.decode_update(tmp_path / f"m{number}", reference=base, out=tmp_path / f"d{number}")
        total += make.read_all(tmp_path / f"d{number}")["w"]
        rest = make.read_all(after)["w"]
    # What is not yet sent is exactly what the sender kept.
    torch.testing.assert_close(total + rest, rounds * step, rtol=1e-4, atol=1e-6)
    assert float((total - rounds * step).norm() / (rounds * step).norm()) < 0.25


def test_another_reference_is_an_error_that_says_send_in_full(pair, tmp_path: Path):
    base, update = pair
    delta.encode_update(full=update, reference=base, out=tmp_path / "message", encoding="delta-int8")
    other = make.model(tmp_path / "other", make.moved(make.read_all(base), 7))
    with pytest.raises(CheckpointError, match="different models; send it in full"):
        delta.decode_update(tmp_path / "message", reference=other, out=tmp_path / "decoded")
    assert not (tmp_path / "decoded").exists()


def test_the_coordinators_direction(tmp_path: Path):
    tensors = make.random_tensors(0, SHAPES, torch.bfloat16)
    held = make.model(tmp_path / "m0", tensors)
    truth = {name: t.float() for name, t in tensors.items()}
    for number in range(1, 5):
        truth = make.moved(truth, number, 1e-3)
        fresh = make.model(tmp_path / f"fresh{number}", {n: t.bfloat16() for n, t in truth.items()}, round=number)
        master = make.checkpoint(tmp_path / f"master{number}", truth)
        message, decoded = tmp_path / f"message{number}", tmp_path / f"m{number}"
        delta.encode_model(
            model=fresh, reference=held, out=message, decoded=decoded, encoding="delta-int8", master=master
        )
        at_facility = delta.decode_update(message, reference=held, out=tmp_path / f"facility{number}")
        assert at_facility.content_sha256 == read_manifest(decoded).content_sha256
        assert (at_facility.kind, at_facility.round, at_facility.encoding) == ("model", number, "full")
        held = decoded
    for name, tensor in make.read_all(held).items():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor.float(), truth[name], rtol=2**-8, atol=1e-4)


def rewritten(message: Path, out: Path, change) -> Path:
    """The message with its stored tensors changed and its manifest made to fit."""
    stored, _ = read_header(message / delta.FILE)
    arrays = {}
    for name, entry in stored.items():
        raw = np.fromfile(entry.file, np.uint8, entry.size, offset=entry.start)
        arrays[name] = (entry.dtype, entry.shape, raw)
    change(arrays)
    out.mkdir()
    planned = [Planned(name=name, dtype=dtype, shape=tuple(shape)) for name, (dtype, shape, _) in arrays.items()]
    with TensorWriter(out, {delta.FILE: planned}) as writer:
        for name, (_, _, raw) in arrays.items():
            writer.write(name, 0, memoryview(raw.tobytes()))
    write_manifest(out, dataclasses.replace(read_manifest(message), files={}))
    return out


def _nan_scale(arrays):
    dtype, shape, raw = arrays["b.weight::scale"]
    arrays["b.weight::scale"] = (dtype, shape, np.frombuffer(np.full(shape, np.nan, np.float32).tobytes(), np.uint8))


def _stranger(arrays):
    arrays["x::q"] = ("I8", (3,), np.zeros(3, np.uint8))


def _half(arrays):
    del arrays["b.weight::scale"]


def _short(arrays):
    dtype, _, raw = arrays["b.weight::q"]
    arrays["b.weight::q"] = (dtype, (5,), raw[:5])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_nan_scale, "malformed: a scale"),
        (_stranger, "no tensor of the reference"),
        (_half, "expected"),
        (_short, "expected I8"),
    ],
)
def test_a_malformed_message_is_refused(pair, tmp_path: Path, change, words: str):
    base, update = pair
    delta.encode_update(full=update, reference=base, out=tmp_path / "message", encoding="delta-int8")
    bad = rewritten(tmp_path / "message", tmp_path / "bad", change)
    with pytest.raises(CheckpointError, match=words):
        delta.decode_update(bad, reference=base, out=tmp_path / "decoded")
    assert not (tmp_path / "decoded").exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("encoding", ["delta-int8", "sparse"])
@pytest.mark.parametrize("twice", ["model", "update"])
def test_a_tied_weight_that_one_side_alone_stores_twice_is_encoded_as_where_both_do(
    tmp_path: Path, encoding: str, twice: str
):
    """Such an update could not be encoded at all; another that lacks a weight, or has one too many, still cannot."""
    start = make.random_tensors(0, {"embed": (40, 30), "w": (50,)}, torch.bfloat16)
    moved = make.moved({name: t.float() for name, t in start.items()}, 1, 1e-3)
    once, both = (one | {"lm_head": one["embed"].clone()} if many else one for one, many in ((moved, 0), (moved, 1)))
    base = make.model(tmp_path / "base", start | ({"lm_head": start["embed"].clone()} if twice == "model" else {}))
    update = make.update(tmp_path / "odd", once if twice == "model" else both, base=base, facility="alpha")
    plain = make.update(tmp_path / "even", both if twice == "model" else once, base=base, facility="alpha")
    found = []
    for one in (update, plain):
        message, out = tmp_path / f"{one.name}-message", tmp_path / f"{one.name}-decoded"
        delta.encode_update(full=one, reference=base, out=message, encoding=encoding)
        delta.decode_update(message, reference=base, out=out)
        found.append(make.read_all(out))
    assert found[0].keys() == found[1].keys() == open_checkpoint(base).tensors.keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not torch.equal(found[0]["embed"], start["embed"].float())
    other = {"w": moved["w"]} if twice == "model" else both | {"lm_head": both["embed"] + 1}
    untied = make.update(tmp_path / "untied", other, base=base, facility="alpha")
    with pytest.raises(CheckpointError, match="send it in full"):
        delta.encode_update(full=untied, reference=base, out=tmp_path / "none", encoding=encoding)


def test_what_stays_at_the_facility_is_no_tied_weight_of_what_leaves(tmp_path: Path):
    """In a new model both may hold the same bytes."""
    base = make.model(tmp_path / "base", {"a": torch.ones(9), "b": torch.ones(9)})
    update = make.update(tmp_path / "update", {"a": torch.full((9,), 2.0)}, base=base, facility="alpha")
    message, personal = tmp_path / "message", Patterns(exclude=("b",))
    delta.encode_update(full=update, reference=base, out=message, encoding="delta-int8", patterns=personal)
    assert {name.partition("::")[0] for name in read_header(message / delta.FILE)[0]} == {"a"}
