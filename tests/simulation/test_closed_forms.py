"""The simulator against closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.simulation.pipelines import collectives
from coordinator.simulation.pipelines.iteration import simulate_layout
from coordinator.simulation.pipelines.layout import Layout, Uplink
from tests.simulation.layouts import random_layout, uniform

ENGINES = ("longest path", "events")


def seconds(layout: Layout, engine: str) -> float:
    return simulate_layout(layout, engine=engine).iteration_seconds


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("transport", ["streaming", "blocking"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (2, 2), (4, 4), (4, 16), (8, 61)])
def test_uniform_pipeline_takes_m_plus_s_minus_1_slots(engine, transport, schedule, stages, micro_batches):
    result = simulate_layout(uniform(stages, micro_batches, schedule=schedule, transport=transport), engine=engine)
    assert result.iteration_seconds == pytest.approx(3 * (micro_batches + stages - 1))
    assert result.bubble_share == pytest.approx((stages - 1) / (micro_batches + stages - 1))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("stages", "virtual", "micro_batches"), [(4, 2, 8), (4, 3, 12), (2, 4, 8), (8, 2, 16)])
def test_interleaving_divides_the_bubble_by_the_chunks_a_device_holds(engine, stages, virtual, micro_batches):
    # Narayanan et al. 2021, arXiv 2104.04473, section 2.2: bubble (S - 1)(F + B) / v.
    layout = uniform(stages, micro_batches, virtual_stages=virtual, schedule="interleaved_1f1b")
    assert seconds(layout, engine) == pytest.approx(3 * micro_batches + 3 * (stages - 1) / virtual)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("stages", "virtual", "micro_batches"), [(4, 1, 8), (4, 2, 8), (8, 1, 32)])
def test_zero_bubble_leaves_a_third_of_the_bubble(engine, stages, virtual, micro_batches):
    # Qi et al. 2023, arXiv 2401.10241, table 2 (ZB-H1): bubble (S - 1)(F + B - 2W) with B both halves, F = W = B / 2.
    layout = uniform(stages, micro_batches, virtual_stages=virtual, schedule="interleaved_zero_bubble")
    assert seconds(layout, engine) == pytest.approx(3 * micro_batches + (stages - 1) / virtual)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_slow_stage_sets_the_pace(engine):
    layout = uniform(4, 50)
    layout.forward_seconds[2], layout.backward_seconds[2] = 5.0, 10.0
    fill = 3 * 3.0
    assert seconds(layout, engine) == pytest.approx(50 * 15 + fill)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_slowest_boundary_streams_and_latency_is_paid_once(engine):
    # GPipe over two stages: forwards take M max(F, w) + the rest once; w = bytes / bandwidth.
    layout = uniform(2, 20, cut_bytes=4.0, latency=0.25, bandwidth=1.0)
    forward = 1 + 20 * 4 + 0.25 + 1  # first forward, 20 messages back to back, latency, last forward
    backward = 2 + 20 * 4 + 0.25 + 2
    assert seconds(layout, engine) == pytest.approx(forward + backward)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("sync", "expected"),
    [
        ("allreduce", 6 * (0.5 + 10 / 4 / 2)),  # 2 (R - 1) steps of a quarter
        ("sharded_ps", 3 * 2 * (0.5 + 10 / 4 / 2)),  # DT-FM: sum over peers of 2 (alpha + c / (R beta))
        ("central_ps", 2 * 3 * (0.5 + 10 / 2)),  # three in, three out, one after the other
    ],
)
def test_data_parallel_modes(engine, sync, expected):
    layout = uniform(1, 3, replicas=4, gradient_bytes=10.0, latency=0.5, bandwidth=2.0, sync=sync)
    result = simulate_layout(layout, engine=engine)
    assert result.sync_seconds == pytest.approx(expected)
    assert result.iteration_seconds == pytest.approx(9 + expected)


@pytest.mark.parametrize("engine", ENGINES)
def test_buckets_hide_what_travels_during_the_last_backward(engine):
    # Two replicas, 4 buckets: one becomes ready every 0.5 s and takes 0.25 s; only the last one shows.
    layout = uniform(1, 1, replicas=2, gradient_bytes=2.0, bandwidth=2.0, buckets=(4,))
    assert simulate_layout(layout, engine=engine).sync_seconds == pytest.approx(0.25)


@pytest.mark.parametrize("engine", ENGINES)
def test_early_stages_synchronise_last_and_late_ones_for_nothing(engine):
    # GPipe: the last stage ends its backwards (S - 1) backward slots before the first; that hides its traffic.
    layout = uniform(3, 4, replicas=2, gradient_bytes=4.0)
    layout.gradient_bytes[0] = 0.0
    assert simulate_layout(layout, engine=engine).sync_seconds == pytest.approx(2.0)  # stage 1: one slot hides 2 of 4


def test_flows_share_an_uplink_fairly():
    # Two replicas send their activations through one uplink that is as fast as one link: each gets half.
    everything = frozenset((a, b) for a in range(4) for b in range(4) if a != b)
    alone = uniform(2, 10, replicas=2, cut_bytes=4.0)
    shared = uniform(
        2, 10, replicas=2, cut_bytes=4.0, uplinks=(Uplink(name="wan", bytes_per_second=1.0, pairs=everything),)
    )
    wide = uniform(
        2, 10, replicas=2, cut_bytes=4.0, uplinks=(Uplink(name="wan", bytes_per_second=99.0, pairs=everything),)
    )
    assert simulate_layout(alone).engine == "longest path"
    assert simulate_layout(shared).engine == "events"
    # Forward and backward do not overlap in GPipe, so the uplink carries two equal flows at any time.
    assert simulate_layout(shared).iteration_seconds == pytest.approx(1 + 10 * 8 + 1 + 2 + 10 * 8 + 2)
    assert simulate_layout(wide).iteration_seconds == pytest.approx(simulate_layout(alone).iteration_seconds)


def test_a_flow_takes_what_a_slower_one_leaves():
    # Max-min: pair 0 -> 2 is limited to 1 by itself, so pair 1 -> 3 gets 3 of the uplink's 4.
    layout = uniform(
        2,
        1,
        replicas=2,
        forward=0.0,
        backward=0.0,
        cut_bytes=6.0,
        bandwidth=10.0,
        uplinks=(Uplink(name="wan", bytes_per_second=4.0, pairs=frozenset({(0, 2), (1, 3)})),),
    )
    layout.bandwidth[0, 2] = 1.0
    timeline = simulate_layout(layout, timeline=True).timeline
    ends = {span.lane: span.end for span in timeline if span.name == "act 0"}
    assert ends == pytest.approx({"link 0 to 2": 6.0, "link 1 to 3": 2.0})


def test_in_flight_micro_batches_of_the_schedules():
    def held(schedule: str, **kind: int) -> list[int]:
        result = simulate_layout(uniform(4, 8, schedule=schedule, **kind))
        return [result.in_flight_micro_batches[d] for d in range(4)]

    assert held("gpipe") == [8, 8, 8, 8]
    assert held("1f1b") == [4, 3, 2, 1]  # Narayanan et al.: at most S - s
    assert held("interleaved_1f1b", virtual_stages=2) == [11, 9, 7, 5]  # warm-up (v-1) S + 2 (S - 1 - s), and one


def test_local_steps_pay_for_synchronising_once_in_k():
    layout = uniform(1, 2, replicas=2, gradient_bytes=10.0, sync="local", sync_every=5)
    assert simulate_layout(layout).iteration_seconds == pytest.approx(6 + 10 / 5)


@pytest.mark.parametrize("mode", ["allreduce", "sharded_ps", "central_ps"])
def test_an_exchange_is_the_sum_of_its_legs(mode):
    """Unlike links, one of them compressed and one of them absent."""
    compression = {(1, 2): (0.5, 0.01), (2, 0): (0.25, 0.02)}
    layout = random_layout(np.random.default_rng(3), 1, (2, 2, 2, 2), compression=compression)

    def of_leg(leg: collectives.Leg) -> float:
        ratio, coding = layout.compression.get((leg.source, leg.target), (1.0, 0.0))
        speed = layout.bandwidth[leg.source, leg.target]
        sent = ratio * leg.bytes / speed if speed else np.inf
        return leg.steps * layout.latency[leg.source, leg.target] + coding * leg.bytes + sent

    for devices in ((0, 1, 2, 3), (2, 0), (3, 1, 2)):
        found = collectives.phases(mode, devices, 5.0)
        slowest = [max(sum(map(of_leg, chain)) for chain in phase) for phase in found]
        legs = [leg for phase in found for chain in phase for leg in chain]
        assert collectives.seconds(layout, mode, devices, 5.0) == pytest.approx(sum(slowest))
        sent = sum(layout.sent_bytes(leg.source, leg.target, leg.bytes) for leg in legs)
        assert collectives.sent_bytes(layout, mode, devices, 5.0) == pytest.approx(sent)
        assert collectives.pairs(mode, devices) == {(leg.source, leg.target) for leg in legs}
    layout.bandwidth[0, 1] = 0.0
    assert collectives.seconds(layout, mode, (0, 1, 2, 3), 5.0) == np.inf
    assert collectives.seconds(layout, mode, (0,), 5.0) == 0.0
