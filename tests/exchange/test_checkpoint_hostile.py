"""The reader against hostile files: a named error, or a consistent answer; never a crash or a large allocation."""

from __future__ import annotations

import json
import os
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from facility.exchange.checkpoints import checkpoint
from facility.exchange.checkpoints.checkpoint import INDEX, open_checkpoint, read_header, save_tensors
from facility.exchange.errors import CheckpointError
from tests.examples import examples

MUTATIONS = int(os.environ.get("CROSSFED_FUZZ", "1500"))
"""CI's share; `CROSSFED_FUZZ=10000` runs the whole."""


def file_of(header: object, body: bytes = b"", *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


def entry(dtype="F32", shape=(2,), offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


NESTED = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
HOSTILE = {
    "empty": (b"", "too short"),
    "a header longer than the file": (file_of({}, length=1 << 40), "claims a header"),
    "a header of 2^64 - 1 bytes": (file_of({}, length=2**64 - 1), "claims a header"),
    "no JSON": (file_of(b"{not json"), "not valid JSON"),
    "no object": (file_of([1, 2]), "not an object"),
    "deep nesting": (file_of(NESTED), "not valid JSON"),
    "broken text": (file_of(b'{"\xff": 1}'), "not valid JSON"),
    "UTF-16": (file_of(json.dumps({"w": entry()}).encode("utf-16"), bytes(8)), "not valid JSON"),
    "UTF-16 without a mark": (file_of(json.dumps({"w": entry()}).encode("utf-16-le"), bytes(8)), "not valid JSON"),
    "UTF-32": (file_of(json.dumps({"w": entry()}).encode("utf-32"), bytes(8)), "not valid JSON"),
    "a byte order mark": (file_of(json.dumps({"w": entry()}).encode("utf-8-sig"), bytes(8)), "not valid JSON"),
    "a key twice in an entry": (
        file_of(b'{"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        "appears twice",
    ),
    "a name twice": (file_of(b'{"w":{},"w":{}}'), "appears twice"),
    "a name with a line break": (file_of({"w\n": entry()}, bytes(8)), "printable"),
    "half a surrogate": (file_of(b'{"\\ud800":{}}'), "printable"),
    "an endless name": (file_of({"w" * 600: entry()}, bytes(8)), "printable"),
    "an unknown dtype": (file_of({"w": entry("F128")}, bytes(8)), "dtype 'F128'"),
    "a dtype that is not text": (file_of({"w": entry(["F32"])}, bytes(8)), "dtype"),
    "surplus keys": (file_of({"w": entry(x=1)}, bytes(8)), "needs exactly"),
    "a negative size": (file_of({"w": entry(shape=(-2,))}, bytes(8)), "whole numbers"),
    "true as a size": (file_of({"w": entry(shape=(True, 2))}, bytes(8)), "whole numbers"),
    "a size that overflows": (file_of({"w": entry(shape=(1 << 62, 1 << 62))}, bytes(8)), "bytes has offsets"),
    "a shape of 17 dimensions": (file_of({"w": entry(shape=(1,) * 17)}, bytes(8)), "whole numbers"),
    "a size of 5,000 digits": (file_of(b'{"w":{"shape":[' + b"9" * 5000 + b"]}}"), "not valid JSON"),
    "offsets past the end": (file_of({"w": entry(shape=(4,), offsets=(0, 16))}, bytes(8)), "in a file of"),
    "offsets backwards": (file_of({"w": entry(offsets=(8, 0))}, bytes(8)), "offsets"),
    "overlapping tensors": (file_of({"v": entry(), "w": entry(offsets=(4, 12))}, bytes(12)), "overlap"),
    "a gap": (file_of({"v": entry(), "w": entry(offsets=(12, 20))}, bytes(20)), "leave a gap"),
    "bytes left over": (file_of({"w": entry()}, bytes(9)), "accounts for"),
    "a pickle": (b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01K\x01s.", "claims a header"),
    "ten million empty mappings": (file_of(b'{"w":[' + b"{}," * 10_000_000 + b"{}]}"), "expected at most 3000000"),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), "__metadata__"),
    "metadata that is a list": (file_of({"__metadata__": []}), "__metadata__"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_header_is_refused_by_name(case: str, tmp_path: Path):
    content, words = HOSTILE[case]
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=words) as error:
        read_header(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(file) in str(error.value) and len(str(error.value)) < 1000
    assert peak < min(40 * len(content), 80 << 20) + 200_000


def consistent(file: Path) -> bool:
    """Whether the reader refuses, or answers with tensors that tile the file."""
    try:
        entries, metadata = read_header(file)
    except CheckpointError:
        return False
    size = file.stat().st_size
    for found in entries.values():
        assert 0 <= found.start <= found.start + found.size <= size
    assert all(isinstance(value, str) for value in metadata.values())
    return True


def test_mutated_files(tmp_path: Path):
    tensors = {"a": torch.ones(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16), "c": torch.arange(4)}
    save_tensors(tmp_path, tensors.items())
    sound = (tmp_path / "model.safetensors").read_bytes()
    header_end = 8 + struct.unpack("<Q", sound[:8])[0]
    rng = random.Random(0)
    tokens = [
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b"-1",
        b"1e9",
        b"null",
        b"9" * 20,
        b'"F32"',
        b'"shape"',
        b"\\u0000",
        b"NaN",
    ]
    file = tmp_path / "mutated.safetensors"
    accepted = 0
    for _ in range(MUTATIONS):
        content = bytearray(sound)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            place = rng.randrange(header_end) if rng.random() < 0.9 else rng.randrange(len(content))
            kind = rng.randrange(6)
            if kind == 0:
                content[place : place + 1] = bytes([rng.randrange(256)])
            elif kind == 1:
                del content[place : place + rng.randrange(1, 20)]
            elif kind == 2:
                content[place:place] = rng.choice(tokens)
            elif kind == 3:
                start = rng.randrange(len(content))
                content[place:place] = content[start : start + rng.randrange(1, 40)]
            elif kind == 4:
                content = content[: rng.randrange(len(content) + 1)]
            else:
                content[0:8] = struct.pack(
                    "<Q", rng.choice((0, 1, len(content), 2**63, rng.randrange(len(content) + 9)))
                )
            if len(content) < 9:
                break
        file.write_bytes(content)
        accepted += consistent(file)
    assert 0 < accepted < MUTATIONS / 2  # a few mutations only touch values or names


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
tensor_like = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I64", "BOOL", "X"]) | json_values,
        "shape": st.lists(st.integers(-1, 9) | st.integers(), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(-1, 64) | st.integers(), min_size=2, max_size=2) | json_values,
    }
)


@settings(max_examples=examples(100), deadline=None)
@given(
    header=st.dictionaries(st.text(max_size=6), tensor_like | json_values, max_size=4) | json_values,
    body=st.binary(max_size=64),
)
def test_any_json_header(header, body: bytes, tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    file.write_bytes(file_of(json.dumps(header).encode(), body))
    consistent(file)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"w": "../outside.safetensors"}}, "plain"),
        ({"weight_map": {"w": "/etc/passwd"}}, "plain"),
        ({"weight_map": {"w": "model.bin"}}, "plain"),
        ({"weight_map": {"w": 3}}, "plain"),
        ({"weight_map": {"w": ["a"]}}, "malformed"),
        ({"weight_map": []}, "malformed"),
        ({}, "malformed"),
        ([], "malformed"),
        ({"weight_map": {"w": "model-2.safetensors"}}, "is missing"),
        ({"weight_map": {"w": "model-1.safetensors", "v": "model-1.safetensors"}}, "in no shard"),
        ({"weight_map": {}}, "malformed|names no"),
    ],
)
def test_hostile_index(index: object, words: str, tmp_path: Path):
    (tmp_path / "model-1.safetensors").write_bytes(file_of({"w": entry()}, bytes(8)))
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["a named pipe", "a device"])
def test_an_index_that_would_be_read_for_ever_is_refused(kind: str, tmp_path: Path):
    if kind == "a device":
        (tmp_path / INDEX).symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / INDEX)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        open_checkpoint(tmp_path)


def test_index_nested_without_end(tmp_path: Path):
    (tmp_path / INDEX).write_bytes(NESTED)
    with pytest.raises(CheckpointError, match="malformed"):
        open_checkpoint(tmp_path)


def test_more_tensors_than_any_model_has_are_refused_however_they_are_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("v", "w"):
        save_tensors(tmp_path, [(f"{name}{number}", torch.ones(1)) for number in range(3)])
        (tmp_path / "model.safetensors").rename(tmp_path / f"{name}.safetensors")
    shards = {f"{name}{number}": f"{name}.safetensors" for name in ("v", "w") for number in range(3)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": shards}))
    assert len(open_checkpoint(tmp_path).tensors) == 6
    monkeypatch.setattr(checkpoint, "MOST_TENSORS", 5)
    with pytest.raises(CheckpointError, match="more than 5 tensors"):
        open_checkpoint(tmp_path)
    monkeypatch.setattr(checkpoint, "MOST_VALUES", 5)
    with pytest.raises(CheckpointError, match="index.json is malformed.*expected at most 5"):
        open_checkpoint(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path):
    for number in (1, 2):
        (tmp_path / f"model-{number}.safetensors").write_bytes(
            file_of({"w": entry(), "v": entry(offsets=(8, 16))}, bytes(16))
        )
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"w": "model-1.safetensors", "v": "model-2.safetensors"}}))
    with pytest.raises(CheckpointError, match="the index says|again in"):
        open_checkpoint(tmp_path)


def test_a_directory_of_pickles_is_no_checkpoint(tmp_path: Path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(CheckpointError, match="safetensors only"):
        open_checkpoint(tmp_path)
