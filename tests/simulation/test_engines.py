"""Laws of the simulator on random layouts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from coordinator.simulation.pipelines.events import Task, run
from coordinator.simulation.pipelines.iteration import simulate_layout
from coordinator.simulation.pipelines.orders import order
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.schedules.ops import Kind
from tests.simulation.layouts import random_layout, uniform

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 2)]


@pytest.mark.parametrize("sync", ["allreduce", "central_ps", "sharded_ps"])
@pytest.mark.parametrize("transport", ["streaming", "blocking"])
@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_both_engines_agree_where_no_link_is_shared(schedule, virtual, transport, sync):
    rng = np.random.default_rng(7)
    layout = random_layout(rng, 4, (8, 8, 4), virtual_stages=virtual, schedule=schedule, transport=transport, sync=sync)

    def stall(replica: int, stage: int, draw: int) -> float:
        return 0.3 if (replica * 7 + stage * 3 + draw) % 5 == 0 else 0.0

    path = simulate_layout(layout, engine="longest path", stall=stall, iterations=2)
    events = simulate_layout(layout, engine="events", stall=stall, iterations=2)
    assert path.iterations == pytest.approx(events.iterations)
    assert path.sync_seconds == pytest.approx(events.sync_seconds)


@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_every_micro_batch_is_computed_once_everywhere_and_after_its_input(schedule, virtual):
    layout = random_layout(np.random.default_rng(1), 3, (6, 6), virtual_stages=virtual, schedule=schedule)
    spans = [s for s in simulate_layout(layout, timeline=True).timeline if s.lane.startswith("device")]
    forwards = {(s.chunk, s.replica, s.name[1:]): s for s in spans if s.name[0] == "F"}
    backwards = {(s.chunk, s.replica, s.name[1:]): s for s in spans if s.name[0] in "BI"}
    assert len(forwards) == len(backwards) == 3 * virtual * 2 * 6
    for (chunk, replica, number), span in forwards.items():
        if chunk:
            assert span.start >= forwards[chunk - 1, replica, number].end
        back = backwards[chunk, replica, number]
        assert back.start >= span.end
        if chunk < 3 * virtual - 1:
            assert back.start >= backwards[chunk + 1, replica, number].end
    for lane in {s.lane for s in spans}:
        mine = sorted((s for s in spans if s.lane == lane), key=lambda s: s.start)
        assert all(a.end <= b.start + 1e-12 for a, b in zip(mine, mine[1:], strict=False))


@pytest.mark.parametrize("seed", range(5))
def test_faster_is_never_slower(seed):
    rng = np.random.default_rng(seed)
    layout = random_layout(rng, 4, (6, 6), schedule=["gpipe", "1f1b"][seed % 2])
    before = simulate_layout(layout).iteration_seconds
    quick = dataclasses.replace(layout, bandwidth=layout.bandwidth * 2, forward_seconds=layout.forward_seconds * 0.9)
    assert simulate_layout(quick).iteration_seconds <= before
    blocking = dataclasses.replace(layout, transport="blocking")
    assert simulate_layout(blocking).iteration_seconds >= before - 1e-9


def test_device_numbers_do_not_matter():
    rng = np.random.default_rng(3)
    layout = random_layout(rng, 3, (4, 4))
    moved = rng.permutation(6)  # device d becomes moved[d]
    back = np.argsort(moved)
    other = dataclasses.replace(
        layout,
        grid=tuple(tuple(int(moved[d]) for d in row) for row in layout.grid),
        latency=layout.latency[np.ix_(back, back)],
        bandwidth=layout.bandwidth[np.ix_(back, back)],
    )
    assert simulate_layout(other).iteration_seconds == pytest.approx(simulate_layout(layout).iteration_seconds)


@pytest.mark.parametrize(
    ("schedule", "virtual", "micro_batches"),
    [
        ("interleaved_1f1b", 2, 8),
        ("interleaved_zero_bubble", 2, 8),
        ("interleaved_1f1b", 3, 10),
        ("interleaved_zero_bubble", 1, 6),
    ],
)
def test_orders_are_those_that_torch_executes(schedule, virtual, micro_batches):
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    name = {"interleaved_1f1b": "ScheduleInterleaved1F1B", "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble"}
    kind = getattr(schedules, name[schedule])
    found = object.__new__(kind)
    found.pp_group_size, found.n_local_stages, found._n_microbatches = 4, virtual, micro_batches
    found.number_of_rounds = max(1, micro_batches // 4)
    found.microbatches_per_round = micro_batches // found.number_of_rounds
    letters = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.INPUT: "I", Kind.WEIGHT: "W"}
    for rank, ops in enumerate(order(schedule, 4, virtual, micro_batches)):
        actions = [a for a in found._calculate_single_rank_operations(rank) if a is not None]
        assert [f"{op.chunk}{letters[op.kind]}{op.micro_batch}" for op in ops] == [str(a) for a in actions]


def test_a_small_message_on_a_shared_link_ends_however_late_it_begins():
    """What is left of it by rounding may take less than the clock's last digit."""
    for begin in np.linspace(20.0, 400.0, 60):
        tasks = [Task([], seconds=begin), Task([0], bytes=1024, bytes_per_second=1.25e10, uplinks=(0,))]
        _, end = run(tasks, [1.25e10])
        assert end[1] == pytest.approx(begin)


def test_bad_input_is_refused():
    with pytest.raises(ConfigurationError, match="multiple"):
        order("interleaved_1f1b", 4, 2, 9)
    with pytest.raises(ConfigurationError, match="schedule is 'zigzag'"):
        order("zigzag", 4, 1, 9)
    with pytest.raises(ConfigurationError, match="virtual_stages=2"):
        order("gpipe", 4, 2, 8)
    with pytest.raises(InputError, match="cannot reach"):
        uniform(2, 2, bandwidth=0.0)
    with pytest.raises(InputError, match="shape"):
        uniform(2, 2, cut_bytes=1.0, forward_seconds=np.ones((3, 1)))
    with pytest.raises(InputError, match="non-finite"):
        uniform(2, 2, forward_seconds=np.full((2, 1), np.nan))
