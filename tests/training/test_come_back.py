"""Laws of interrupted rounds: stopped k times and gone on, a round ends like an undisturbed one."""

from __future__ import annotations

import errno
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from facility.exchange.messages.layout import LimitSettings
from facility.exchange.messages.manifest import sha256_of
from facility.exchange.messages.outcome import ENDING, Outcome
from facility.exchange.messages.report import read_report
from facility.rounds import sealed
from facility.rounds.sealed import check_kept, find_flaw, replace_directory, write_seal
from facility.training import finish
from facility.training.state import state
from facility.training.stop import Stop
from tests.distributed import run_distributed
from tests.training.federation import largest_difference, started, write_dataset
from tests.training.layouts import TWO, arguments, rounds_in, run_rounds


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data")


@pytest.mark.slow
def test_an_interrupted_round_ends_bit_for_bit_like_an_undisturbed_one(tmp_path: Path, pico_llama: Path, dataset: Path):
    quiet = arguments(tmp_path / "quiet", pico_llama, dataset, steps=60)
    rounds_in([("quiet", quiet)])
    stopped = arguments(tmp_path / "stopped", pico_llama, dataset, steps=60)
    codes = []
    for number in (signal.SIGTERM, signal.SIGUSR1, None):
        (process,) = started([*stopped, "--progress"], tmp_path / "said" / str(len(codes)))
        if number is not None and process.says("step "):
            process.signal(number)
        result = process.ended()
        codes.append(result.returncode)
        if codes[-1] == 0:
            break
        assert codes[-1] == Outcome.CHECKPOINTED, result.stderr
        assert not (tmp_path / "stopped/out").exists()
    assert codes[-1] == 0 and codes[0] == Outcome.CHECKPOINTED
    assert sha256_of(tmp_path / "quiet/out/model.safetensors") == sha256_of(tmp_path / "stopped/out/model.safetensors")
    assert read_report(tmp_path / "stopped/out").training_loss == read_report(tmp_path / "quiet/out").training_loss
    assert read_report(tmp_path / "stopped/out").details["interruptions"] == len(codes) - 1
    assert not (tmp_path / "stopped/state/paused").exists()


@pytest.mark.parametrize("number", ENDING)
def test_each_schedulers_warning_stops_before_the_next_step(number: signal.Signals):
    """SIGUSR2 is grid engine's before it kills; a process without a handler dies of it, and its round is lost."""
    before = {one: signal.getsignal(one) for one in ENDING}
    try:
        stop = Stop(LimitSettings(), began=time.perf_counter())
        assert not stop.wanted(1)
        signal.raise_signal(number)
        assert stop.wanted(2) and number.name in stop.reason
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def test_an_evaluation_ends_as_it_is_asked_to_and_not_when_it_is_killed(tmp_path: Path, pico_llama: Path):
    """There is no step to stop before: it went on until the launcher killed it, two minutes after its run had ended."""
    data = write_dataset(tmp_path / "data", validation=200_000)
    (process,) = started(arguments(tmp_path / "one", pico_llama, data, round=3), tmp_path / "said")  # of 3
    assert process.says("1 rank on ")
    process.signal(signal.SIGTERM)
    began = time.monotonic()
    assert process.ended().returncode == -signal.SIGTERM
    assert time.monotonic() - began < 20


def test_what_was_saved_in_a_round_stays_until_its_update_is_complete(
    tmp_path: Path, pico_llama: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
):
    """A job that is killed as it writes the update, or finds the disk full, does not lose the steps of those before."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    stopped = arguments(tmp_path, pico_llama, dataset, limits={"stop_after": 2})
    rounds_in([("stopped", stopped)], expect=Outcome.CHECKPOINTED)
    with monkeypatch.context() as context:
        context.setattr(finish, "write_update", full)
        rounds_in([("full", arguments(tmp_path, pico_llama, dataset))], expect=None)
    assert (tmp_path / "state/round-0").is_dir() and not (tmp_path / "out").exists()
    assert "resuming after step 2" in rounds_in([("again", arguments(tmp_path, pico_llama, dataset))])["again"][0]
    assert not (tmp_path / "state/paused").exists()


def with_small_files(rank: int, world: int, cases: list[tuple[str, list[str]]], most: int) -> list[Any]:
    """`run_rounds`, where the kernel lets the last rank write no file beyond `most` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == world - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        return run_rounds(rank, world, cases)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_disk_without_room_for_a_mid_round_checkpoint_costs_the_round_that_checkpoint_alone(
    tmp_path: Path, pico_llama: Path, dataset: Path, ranks: int
):
    """The whole round was lost, at the one rank that met it and at those that lost contact with it."""
    quiet = arguments(tmp_path / "quiet", pico_llama, dataset)
    full = arguments(tmp_path / "full", pico_llama, dataset, limits={"save_every": 2})
    rounds_in([("quiet", quiet)], ranks=ranks)
    update, checkpoint = (pico_llama / "model.safetensors").stat().st_size, 3
    most = int(update * (checkpoint - 0.5))  # the update and both moments have room, with the weights they have none
    if ranks == 1:
        results = [with_small_files(0, 1, [("full", full)], most)]
    else:
        results = run_distributed(with_small_files, ranks, [("full", full)], most)
    assert [code for ((_, code, _),) in results] == [0] * ranks, results
    ((_, _, said),) = results[0]
    assert "after step 2 of 3 no checkpoint was written, and the round goes on" in said
    assert "may not grow so large" in said and "same command" not in said
    assert largest_difference(tmp_path / "quiet/out", tmp_path / "full/out") == 0.0
    assert sorted(path.name for path in (tmp_path / "full/state").iterdir() if path.name[0] != "s") == ["round-0"]


def test_a_kill_as_one_state_takes_the_place_of_another_leaves_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """To remove the old one takes seconds where it is large, and a scheduler's kill comes when it comes."""

    def killed(directory: Path, **_: object) -> None:
        if directory.is_dir():
            (directory / "model.safetensors").unlink()
            raise KeyboardInterrupt

    for name in ("paused", "paused.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
        write_seal(tmp_path / name)
    monkeypatch.setattr(sealed.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        replace_directory(tmp_path / "paused", tmp_path / "paused.new")
    assert (tmp_path / "paused/model.safetensors").read_text() == "paused.new"
    assert not find_flaw(tmp_path / "paused") and check_kept(tmp_path, 0) == []
    monkeypatch.undo()
    state.drop_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_kill_between_the_two_moves_of_a_state_loses_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The mid-round checkpoint lay beside its place, and the round began anew."""
    for name in ("paused", "paused.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
        write_seal(tmp_path / name)
    rename = sealed.os.rename

    def killed(source: Path, target: Path) -> None:
        if source.name == "paused.new":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(sealed.os, "rename", killed)
        replace_directory(tmp_path / "paused", tmp_path / "paused.new")
    assert not (tmp_path / "paused").exists()
    assert check_kept(tmp_path, 0) == []
    assert (tmp_path / "paused/model.safetensors").read_text() == "paused.new"
    state.drop_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("now", "goes_on", "samples"),
    [({"batch_sequences": 6}, True, 2 * 4 + 6), ({"steps": 1}, False, 4), ({"batch_sequences": 2}, False, 3 * 2)],
    ids=["a larger batch", "fewer steps", "a smaller batch"],
)
def test_a_round_that_goes_on_under_other_settings_counts_what_it_was_trained_on(
    tmp_path: Path, pico_llama: Path, dataset: Path, now: dict[str, Any], goes_on: bool, samples: int
):
    """It is its update's weight; more than the settings allow is refused, and would be every time again."""
    rounds_in(
        [("stopped", arguments(tmp_path, pico_llama, dataset, limits={"stop_after": 2}))], expect=Outcome.CHECKPOINTED
    )
    said = rounds_in([("changed", arguments(tmp_path, pico_llama, dataset, **now))])["changed"][0]
    assert ("the round begins anew: its interrupted attempt was one of other settings" in said) != goes_on
    assert ("resuming after step 2" in said) == goes_on
    assert read_report(tmp_path / "out").samples == samples


@pytest.mark.slow
def test_a_round_goes_on_in_another_layout(tmp_path: Path, pico_llama: Path, dataset: Path):
    """One process, then two shards, then a pipeline, each for two steps."""
    rounds_in([("quiet", arguments(tmp_path / "quiet", pico_llama, dataset, steps=6, rounds=1))])

    def attempt(ranks: int, expect: int, **training: object) -> None:
        name = "stopped"
        rounds_in(
            [(name, arguments(tmp_path / name, pico_llama, dataset, steps=6, rounds=1, **training))],
            ranks=ranks,
            expect=expect,
        )

    attempt(1, Outcome.CHECKPOINTED, limits={"stop_after": 2})
    attempt(2, Outcome.CHECKPOINTED, limits={"stop_after": 4})
    attempt(2, 0, layout={"stages": 2, "units": [[0, 4], [4, 6]]})
    assert largest_difference(tmp_path / "quiet/out", tmp_path / "stopped/out") < 1e-5
    expected, found = read_report(tmp_path / "quiet/out"), read_report(tmp_path / "stopped/out")
    assert found.training_loss == pytest.approx(expected.training_loss, abs=1e-6)
    assert found.loss_returned == pytest.approx(expected.loss_returned, abs=1e-6)


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layers that were frozen": ({"freeze": ["*layers.0*"]}, {}),
    "matrices that AdamW takes": (
        {"optimizer": "muon"},
        {"optimizer": "muon", "optimizer_parameters": {"adamw": "*q_proj*"}},
    ),
    "adapters of another rank": ({"lora": {"rank": 2}}, {"lora": {"rank": 4}}),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_what_other_settings_kept_is_of_no_use_and_ends_no_round(
    tmp_path: Path, pico_llama: Path, dataset: Path, change: str
):
    """After a change to what is trained the optimizer begins anew, and so does an attempt that was interrupted."""
    before, after = CHANGES[change]
    rounds_in([("before", arguments(tmp_path / "before", pico_llama, dataset, **before))])
    (tmp_path / "before/out").rename(tmp_path / "before/first")
    changed = arguments(tmp_path / "before", pico_llama, dataset, 1, **after)
    new = arguments(tmp_path / "new", pico_llama, dataset, 1, **after)
    said = rounds_in([("changed", changed), ("new", new)])["changed"][0]
    assert "the optimizer begins with new state" in said
    assert largest_difference(tmp_path / "before/out", tmp_path / "new/out") == 0.0
    stopped = arguments(tmp_path / "stopped", pico_llama, dataset, 1, **before, limits={"stop_after": 2})
    rounds_in([("stopped", stopped)], expect=Outcome.CHECKPOINTED)
    said = rounds_in([("again", arguments(tmp_path / "stopped", pico_llama, dataset, 1, **after))])["again"][0]
    assert "the round begins anew" in said
    assert largest_difference(tmp_path / "stopped/out", tmp_path / "new/out") == 0.0


@pytest.mark.slow
def test_every_stage_of_a_pipeline_begins_anew_where_one_holds_what_was_frozen(
    tmp_path: Path, pico_llama: Path, dataset: Path
):
    for name, number, frozen in (("one", 0, True), ("one", 1, False), ("new", 1, False)):
        freeze = {"freeze": ["*layers.0*"]} if frozen else {}
        rounds_in([(name, arguments(tmp_path / name, pico_llama, dataset, number, **freeze, **TWO["1f1b"]))], ranks=2)
        (tmp_path / name / "out").rename(tmp_path / name / str(number))
    assert largest_difference(tmp_path / "one/1", tmp_path / "new/1") == 0.0


def test_an_attempt_that_goes_on_takes_a_step_however_long_loading_took(monkeypatch: pytest.MonkeyPatch):
    """One that stopped before its first step would be repeated for ever; the first has evaluated what it received."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    handlers = {number: signal.getsignal(number) for number in ENDING}
    try:
        first, second, late = (Stop(LimitSettings(seconds=100.0), began=began) for began in (0.0, 0.0, -50.0))
        now[0] = 60.0
        assert first.wanted(0) and "time budget" in first.reason
        assert not second.wanted(0, resumed=True), "40 seconds are left"
        now[0] = 61.0
        assert second.wanted(1, resumed=True), "saving may take as long as loading did"
        assert late.wanted(0, resumed=True), "nothing is left"
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.parametrize(
    "end, stall, ranks",
    [(signal.SIGKILL, 20.0, 2), (signal.SIGSTOP, 6.0, 2), (signal.SIGSTOP, 6.0, 4)],
    ids=["dies", "hangs", "hangs beside replicas"],
)
def test_under_all_reduce_a_rank_that_dies_or_hangs_takes_the_others_down(
    tmp_path: Path, pico_llama: Path, dataset: Path, end: signal.Signals, stall: float, ranks: int
):
    """Within the stated time (`stall_seconds`), without a hang, as a transient error: the round may be run again.

    Of four ranks two shard each replica, in groups of their own.
    """
    layout = {"replicas": ranks // 2}
    given = arguments(tmp_path, pico_llama, dataset, steps=10_000, stall_seconds=stall, layout=layout)
    *others, last = started([*given, "--progress"], tmp_path / "said", ranks=ranks)
    try:
        assert others[0].says("step ")
        last.signal(end)
        results = [process.ended(seconds=200) for process in others]
    finally:
        for process in (*others, last):
            process.kill()
    assert [result.returncode for result in results] == [75] * (ranks - 1)
    assert "lost contact with another rank" in "".join(result.stderr for result in results)
    assert not any("Traceback" in result.stderr for result in results)
    assert not (tmp_path / "out").exists()


def test_a_bug_is_no_lost_contact():
    from facility.training.processes.ranks import lost_contact

    assert lost_contact(RuntimeError("shapes differ")) == "" and lost_contact(ValueError("gloo/transport")) == ""
    closed = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:9")
    assert "Connection closed" in lost_contact(closed)
    wrapped = ValueError("step 3")
    wrapped.__cause__ = closed
    assert "Connection closed" in lost_contact(wrapped)
