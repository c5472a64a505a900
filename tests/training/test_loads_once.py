"""A rank alone reads the received model once: what it loads is what it has verified."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import torch
from torch import nn

from facility.exchange.checkpoints import native, step_norms
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.step_norms import StepNorms
from facility.exchange.errors import ManifestError
from facility.exchange.files import streamed_digest
from facility.exchange.files.streamed_digest import StreamedDigest
from facility.exchange.messages.manifest import Manifest, check_digest, read_manifest, sha256_of, write_manifest
from facility.training.data.inputs import digests_of
from facility.training.shards import LocalShard, load_shards
from facility.training.state.save import create_files, plan_files, write_shards
from tests.pico import save_pico


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """With more than ten layers, whose names lie in another order than the layers."""
    save_pico(tmp_path, num_hidden_layers=12)
    write_manifest(tmp_path, Manifest(kind="model", federation="pico", round=0))
    return tmp_path


def loaded(model: Path) -> tuple[list[LocalShard], dict[str, StreamedDigest]]:
    """Every tensor of the model, asked for in some order, and the digests made on the way."""
    checkpoint = open_checkpoint(model)
    parts = []
    for name, entry in checkpoint.tensors.items():
        parameter = nn.Parameter(torch.empty(entry.shape))
        parts.append(LocalShard(name=name, shape=entry.shape, first=0, tensor=parameter.detach(), parameter=parameter))
    random.Random(3).shuffle(parts)
    digests = digests_of(model, read_manifest(model))
    load_shards(parts, checkpoint, hashed={digest.path: digest for digest in digests.values()})
    return parts, digests


def test_loading_makes_the_digests_and_reads_only_headers_again(model: Path, monkeypatch):
    monkeypatch.setattr(streamed_digest, "MOST_WAITING", 0)  # as if the files were far larger than what may wait
    again: list[int] = []
    original = StreamedDigest._read

    def noted(self: StreamedDigest, start: int, end: int) -> int:
        again.append(end - start)
        return original(self, start, end)

    monkeypatch.setattr(StreamedDigest, "_read", noted)
    parts, digests = loaded(model)
    manifest, checkpoint = read_manifest(model), open_checkpoint(model)
    assert digests
    for name, digest in digests.items():
        check_digest(model, manifest, name, digest.finish())
    assert sum(again) == min(entry.start for entry in checkpoint.tensors.values())
    assert all(torch.equal(part.tensor, checkpoint.read(part.name)) for part in parts)


def test_one_altered_bit_is_noticed(model: Path):
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    _, digests = loaded(model)
    with pytest.raises(ManifestError, match="another sha256"):
        for name, digest in digests.items():
            check_digest(model, read_manifest(model), name, digest.finish())


def test_saving_makes_the_digests_whatever_the_order_of_the_parts(model: Path, tmp_path: Path, monkeypatch):
    """The trainer holds layer 2 before layer 10, and a file of names in their order has it after."""
    monkeypatch.setattr(streamed_digest, "MOST_WAITING", 0)
    monkeypatch.setattr(StreamedDigest, "_read", lambda *_: pytest.fail("what was written is read again"))
    checkpoint = open_checkpoint(model)
    parts = []
    for name in checkpoint.tensors:
        parameter = nn.Parameter(checkpoint.read(name))
        shape = tuple(parameter.shape)
        parts.append(LocalShard(name=name, shape=shape, first=0, tensor=parameter.detach(), parameter=parameter))
    random.Random(5).shuffle(parts)
    planned = [(name, "BF16", tuple(entry.shape)) for name, entry in sorted(checkpoint.tensors.items())]
    out = tmp_path / "out"
    out.mkdir()
    slots, headers = plan_files(planned)
    with StepNorms(checkpoint) as norms:
        known = write_shards(out, slots, parts, hashed=create_files(out, slots, headers), norms=norms)
        norms.write(out)
    assert known == {path.name: sha256_of(path) for path in out.glob("*.safetensors")}
    if native.library() is not None:
        as_written = json.loads((out / step_norms.NAME).read_text())
        with StepNorms(checkpoint) as norms:
            norms.read(open_checkpoint(out))
            norms.write(out)
        assert as_written == json.loads((out / step_norms.NAME).read_text())


def test_loading_opens_each_file_once(model: Path, monkeypatch):
    """Each opening is a question to the metadata server of a parallel file system, from every rank."""
    parts, _ = loaded(model)
    checkpoint, opened, real = open_checkpoint(model), [], os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: (opened.append(path), real(path, *rest))[1])
    before = os.listdir("/proc/self/fd")
    load_shards(parts, checkpoint)
    assert opened == [model / "model.safetensors"] and os.listdir("/proc/self/fd") == before
