"""The counting of a round's bytes runs to its end, and counts what the steps of trainers' own processes moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.bytes import run


@pytest.mark.slow
def test_bytes_of_all_steps_are_counted_where_trainers_are_processes_of_their_own(tmp_path: Path):
    calls, sizes = run(tmp_path, 32, 2, 1, {}, {}, "local", masks=False)
    assert calls["round"]["rchar"] > 2 * sizes["model"]  # each facility reads the model
    assert calls["round"]["wchar"] > sizes["updates"] > sizes["model"]
    assert calls["aggregate"]["rchar"] > sizes["updates"]
    assert calls["aggregate"]["wchar"] > sizes["model"]
