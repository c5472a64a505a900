"""Laws of simulated pipelines that never flush: nobody waits for ever, known times by hand."""

from __future__ import annotations

import pytest

from facility.exchange.messages.emulation import Emulation
from facility.exchange.messages.sync import SyncSettings
from facility.exchange.scheduling.draws import uniform_draw
from tests.reproductions.endless import _Run, simulate_endless


def test_one_pipeline_by_hand():
    """Forward 1 s, backward 2 s, two stages: the last stage works without a pause from second 1, the first ends it."""
    rate = simulate_endless(SyncSettings(), 1, 2, lambda p, s, draw: 2.0 if draw % 2 else 1.0, steps=10)
    assert 10 / rate == pytest.approx(1 + 10 * 3 + 2)


def test_a_single_stage_without_stalls_is_as_fast_as_its_passes():
    settings = SyncSettings(policy="partial_reduce", bound=0)
    assert simulate_endless(settings, 4, 1, lambda p, s, draw: 0.5, steps=20) == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_stages_that_wait_for_connections_never_wait_in_a_circle(bound: int):
    for seed in range(12):
        emulation = Emulation(probability=0.3, seconds=1.0, seed=seed, factors=(1.0, 3.0) if seed % 2 else ())
        run = _Run(
            SyncSettings(policy="partial_reduce", bound=bound, minimum=2),
            4,
            3,
            lambda p, s, d, law=emulation: law.duration(p, 0.1 + 0.01 * uniform_draw("pass", p, s, d), d, stage=s),
            20,
            0.01,
        )
        run.run()
        assert run.updates >= 4 * 20 and run._holder is None, (bound, seed)
        assert not run._asking and not run._met and not run._reader


def test_with_a_bound_of_one_every_group_is_everybody():
    def seconds(pipeline: int, stage: int, draw: int) -> float:
        return 0.1 + 0.1 * uniform_draw("pass", pipeline, stage, draw)

    partial, whole = (
        simulate_endless(SyncSettings(policy=policy, bound=1, progress="each"), 3, 2, seconds, steps=15)
        for policy in ("partial_reduce", "allreduce")
    )
    assert partial == pytest.approx(whole)
