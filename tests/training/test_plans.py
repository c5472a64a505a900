"""A plan in the trainer: unlike shares give the weights of one process; other devices than the plan's are refused."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from facility.exchange.messages.plan import CompressedLink, Plan, write_plan
from facility.exchange.messages.report import read_report
from tests.distributed import run_distributed
from tests.pico import save_pico
from tests.training.federation import largest_difference, write_dataset
from tests.training.layouts import arguments, rounds_in, run_rounds


def plan(**fields) -> Plan:
    return Plan(stages=1, replicas=2, grid=((0, 1),), stage_units=((0, 6),), **fields)


@pytest.mark.slow
def test_replicas_of_a_whole_model_may_make_unlike_numbers_of_micro_batches(tmp_path: Path):
    """Three micro-batches beside one of two sequences; a plan that names other devices ends each rank with code 2."""
    model, dataset = save_pico(tmp_path / "model"), write_dataset(tmp_path / "data")
    one = arguments(tmp_path / "one", model, dataset, batch_sequences=8)
    here = [f"{socket.gethostname()}:cpu{rank}" for rank in range(2)]
    cases = []
    small = CompressedLink(source=0, destination=1, codec="int8", ratio=0.5)
    kinds = {
        "own": {"device_ids": tuple(here)},
        "any": {},
        "turned": {"device_ids": tuple(reversed(here))},
        "other": {"device_ids": ("x:cpu0", "x:cpu1")},
        "compressed": {"compressed_links": (small,)},
    }
    for name, fields in kinds.items():
        (tmp_path / name).mkdir()
        write_plan(tmp_path / name / "plan.json", plan(micro_batches=(3, 1), micro_batch_samples=2, **fields))
        lines = arguments(tmp_path / name, model, dataset, batch_sequences=8)
        cases.append((name, [*lines, "--plan", str(tmp_path / name / "plan.json")]))
    assert run_rounds(0, 1, [("one", one)])[0][1] == 0
    for results in run_distributed(run_rounds, 2, cases, timeout=240):
        for name, code, said in results:
            assert code == (0 if name in ("own", "any") else 2), said
            if name == "other":
                assert "of the plan is x:cpu" in said and "measure and plan again" in said
            if name == "turned":
                assert "it knows" in said
            if name == "compressed":
                assert "compresses 1 links" in said
    for name in ("own", "any"):
        assert largest_difference(tmp_path / "one" / "out", tmp_path / name / "out") < 1e-5
        assert read_report(tmp_path / name / "out").training_loss == pytest.approx(
            read_report(tmp_path / "one" / "out").training_loss, abs=1e-5
        )


@pytest.mark.slow
def test_a_pipeline_of_fewer_micro_batches_than_stages_is_one_process(tmp_path: Path):
    """torch's own 1F1B refuses it, and planners give a slow replica a single micro-batch."""
    model, dataset = save_pico(tmp_path / "model"), write_dataset(tmp_path / "data")
    one = arguments(tmp_path / "one", model, dataset, batch_sequences=4)
    two = arguments(tmp_path / "two", model, dataset, batch_sequences=4)
    pipeline = Plan(stages=2, replicas=1, grid=((0,), (1,)), stage_units=((0, 2), (2, 6)), schedule="1f1b")
    write_plan(tmp_path / "plan.json", replace(pipeline, micro_batches=(1,), micro_batch_samples=4))
    rounds_in([("one", one)])
    rounds_in([("two", [*two, "--plan", str(tmp_path / "plan.json")])], ranks=2)
    assert largest_difference(tmp_path / "one" / "out", tmp_path / "two" / "out") < 5e-6
