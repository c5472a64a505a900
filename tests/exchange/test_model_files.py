"""A model's JSON files have one reader: what it refuses, it refuses with one type of error, for whoever asks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from facility.exchange.checkpoints.adapters import class_in
from facility.exchange.checkpoints.model_files import MOST_BYTES, model_file_if_any, read_model_file
from facility.exchange.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"[" * 100_000, "nested too deep"),
        (b"[4]", "holds a list, expected an object"),
        (b"{", "Expecting property name"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b" " * MOST_BYTES + b"{}", f"larger than {MOST_BYTES} bytes"),
        (None, "No such file"),
    ],
    ids=["deep", "list", "cut", "latin-1", "large", "missing"],
)
def test_what_is_not_a_models_file_is_one_error_that_names_it(tmp_path: Path, content: bytes | None, why: str):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{why}.*copy it again"):
        read_model_file(tmp_path)
    assert model_file_if_any(tmp_path) == {}


def test_infinite_numbers_of_transformers_own_files_are_read(tmp_path: Path):
    """Mamba 2's config.json on the hub has `"time_step_limit": [0.0, Infinity]`: its class was not known for that."""
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Mamba2ForCausalLM"], "time_step_limit": [0.0, float("inf")]})
    )
    assert model_file_if_any(tmp_path)["time_step_limit"] == [0.0, float("inf")]
    assert class_in(tmp_path) == "Mamba2ForCausalLM"


def test_nothing_else_takes_a_models_file_apart():
    """`json.loads` of config.json in another file would forget one of the refusals above."""
    command = ["git", "grep", "-lE", r"(loads|read_json)\(.*config\.json", "--", "coordinator", "facility"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout == ""
