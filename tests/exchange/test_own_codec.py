"""A delta codec is one file: known by what it declares, and one from another package by its entry point."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from facility.exchange.checkpoints.codecs import PART
from facility.exchange.delta_codecs import CODECS, DeltaCodec, declared_codec, encodings, load_codec
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.settings import TrainingSettings, describe_codecs

HALF = """
import numpy as np
from facility.exchange.delta_codecs import Codec, DeltaCodec

DECLARATION = DeltaCodec(name="half", summary="rounded to half precision", implementation="CODEC", bytes_per_value=2.0)
CODEC = Codec(
    fields=lambda elements, selected: [("h", "F16", elements)],
    encode=lambda values, limit: {"h": values.astype(np.float16)},
    decode=lambda stored, count: stored["h"].astype(np.float32),
)
"""
USE = """
from pathlib import Path
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.delta import decode_update, encode_update
from facility.exchange.messages.manifest import Manifest, read_manifest, write_manifest
from facility.exchange.messages.settings import TrainingSettings, describe_codecs
from tests.pico import save_pico

assert TrainingSettings(encoding="half", export_dtype="float32").encoding == "half"
assert [one["name"] for one in describe_codecs()][-1] == "half"
for name, seed in (("old", 0), ("new", 1)):
    write_manifest(save_pico(Path(name), seed=seed), Manifest(kind="model", federation="f", round=0))
done = encode_update(full=Path("new"), reference=Path("old"), out=Path("message"), encoding="half")
assert read_manifest(Path("message")).encoding == "half" and 0 < done.relative_error < 1e-3
decode_update(Path("message"), reference=Path("old"), out=Path("back"))
new, back = open_checkpoint(Path("new")), open_checkpoint(Path("back"))
assert set(new.tensors) == set(back.tensors)
assert all((new.read(n) - back.read(n)).abs().max() < 1e-3 for n in new.tensors)
"""


@pytest.mark.slow
def test_one_from_another_package_encodes_and_decodes(tmp_path: Path) -> None:
    (tmp_path / "half_codec.py").write_text(HALF)
    info = tmp_path / "half-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: half\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[crossfed.codecs]\nhalf = half_codec:CODEC\n")
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, env={"PYTHONPATH": path, "PATH": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["delta-int9", "half_codec:CODEC", "os.path", ""])
def test_only_names_are_taken(name: str) -> None:
    """A message names its codec: a dotted path would let it choose what is imported."""
    with pytest.raises(ConfigurationError, match="expected one of full, changed, delta-int4, delta-int8, sparse"):
        declared_codec(name)
    with pytest.raises(
        ConfigurationError, match="expected one of 'full', 'changed', 'delta-int4', 'delta-int8', 'sparse'"
    ):
        TrainingSettings(encoding=name)


def test_what_is_read_from_a_file_is_what_it_declares() -> None:
    for name, entry in CODECS.built_in.items():
        module = importlib.import_module(entry.module)
        assert entry == DeltaCodec(**(vars(module.DECLARATION) | {"module": module.__name__})), name
        assert load_codec(name) is module.CODEC and entry.summary
    assert encodings() == ("full", "changed", "delta-int4", "delta-int8", "sparse", "sparseloco")


@pytest.mark.parametrize("name", CODECS.built_in)
def test_what_a_codec_does_is_what_it_declares(name: str) -> None:
    codec, declared = load_codec(name), declared_codec(name)
    assert declared.lossless == codec.of_bits
    assert (codec.selection is not None) == (declared.selects or declared.lossless)


@pytest.mark.parametrize("name", [name for name in CODECS.built_in if not declared_codec(name).lossless])
def test_a_message_is_as_large_as_declared(name: str) -> None:
    """A lossless one is as large as what changed asks for (tests/exchange/test_changed.py)."""
    values, codec, declared = np.random.default_rng(0).standard_normal(4 * PART), load_codec(name), declared_codec(name)
    limit = float(np.quantile(np.abs(values), 0.25)) if declared.selects else 0.0
    parts = values.astype(np.float32).reshape(4, PART)
    found = sum(array.nbytes for part in parts for array in codec.encode(part, limit).values())
    assert found == pytest.approx(declared.message_bytes(values.size, 0.75), rel=2e-3)


def test_the_documentation_lists_the_setting_of_a_codec_that_selects() -> None:
    described = {entry["name"]: entry for entry in describe_codecs()}
    (density,) = described["sparse"]["parameters"]
    assert density["name"] == "sparse_density" and density["default"] == 0.75 and "kept, trained" in density["text"]
