"""Laws of `facility.round`: it ends with an update or with a reason, never otherwise, and trains nothing twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from facility import round as round_module
from facility.exchange.checkpoints.delta import decode_update
from facility.exchange.messages.manifest import (
    Manifest,
    read_manifest,
    sha256_of,
    verify_manifest,
    with_extra,
    write_manifest,
)
from facility.exchange.messages.report import read_failure
from facility.exchange.messages.settings import FacilitySettings, TrainingSettings
from facility.exchange.process_start import started_at
from facility.launching.notes import PLACE
from facility.launching.supervise import Ending
from facility.rounds.finished import key_of
from facility.rounds.job import Job
from facility.rounds.smaller import residual_path
from facility.rounds.sweep import NOTE, forget_earlier, note_job, remove_old_rounds, sweep_jobs
from tests.aggregation.make import read_all
from tests.distributed import Started, help_of
from tests.pico import save_pico
from tests.training.federation import write_dataset, write_settings

STAND_IN = ("--module", "tests.stand_in_trainer")


@dataclass
class Site:
    """A facility's directories as the engine lays them out: a UUID for each job and each transfer."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    rounds: int = 0

    def send(self, round: int = 0, seed: int = 0) -> Path:
        model = save_pico(self.root / "work" / str(uuid.uuid4()) / "model", seed=seed)
        write_manifest(model, Manifest(kind="model", federation="pico", round=round))
        return model

    def command(self, model: Path, *more: str, round: int = 0, dataset: str | None = None) -> tuple[list[str], Path]:
        job = self.root / "work" / str(uuid.uuid4())
        job.mkdir(parents=True)
        return [
            sys.executable,
            "-m",
            "facility.round",
            "--model",
            str(model),
            "--dataset",
            dataset or str(self.root / "data"),
            "--settings",
            str(self.root / "settings.json"),
            "--round",
            str(round),
            "--out",
            "update",
            *more,
        ], job

    def run(
        self, model: Path, *more: str, real: bool = False, **options
    ) -> tuple[subprocess.CompletedProcess[str], Path]:
        command, job = self.command(model, *(() if real else STAND_IN), *more, **options)
        return self.start(command, job).ended(), job / "update"

    def start(self, command: list[str], job: Path, **environment: str) -> Started:
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | self.environment | environment
        return Started("facility.round", command[3:], job.parent / f"{job.name}.said", environment, directory=job)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    write_dataset(tmp_path / "data")
    write_settings(tmp_path / "settings.json", ranks=2)
    return Site(root=tmp_path, environment={"CROSSFED_STATE": str(tmp_path / "state")})


@pytest.mark.slow
def test_a_round_trains_on_two_ranks_and_leaves_an_update(site: Site):
    model = site.send()
    result, update = site.run(model, real=True)
    assert result.returncode == 0, result.stderr
    manifest = verify_manifest(update)
    assert (manifest.kind, manifest.round, manifest.facility) == ("update", 0, "north")
    assert manifest.base_sha256 == read_manifest(model).content_sha256
    assert "ranks 0-1 of 2" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("real", [True, False], ids=["CrossFed's own trainer", "another"])
def test_what_a_sparse_message_left_is_neither_lost_nor_counted_twice(site: Site, real: bool):
    """One begins its training from a share of it, the other knows nothing of it; the second round moves nothing."""
    state, left = site.root / "state/pico/north", []
    for number, rate in enumerate((1e-2, 1e-30)):
        write_settings(site.root / "settings.json", encoding="sparseloco", unsent_share=0.25, learning_rate=rate)
        model = site.send(round=number)
        result, update = site.run(model, round=number, real=real or number == 0)
        assert result.returncode == 0, result.stderr
        left.append(read_all(residual_path(state, number)))
    decode_update(update, reference=model, out=site.root / "decoded")
    arrived, received = read_all(site.root / "decoded"), read_all(model)
    for name, before in left[0].items():
        assert before.any()
        found = arrived[name].float() - received[name].float() + left[1][name]
        torch.testing.assert_close(found, 0.95 * before, atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_warning_of_the_jobs_end_ends_nothing_that_is_done_without_ranks(site: Site, monkeypatch, number: int):
    """A trained update is then encoded, kept and signed, for which some minutes are left."""
    ended_by: list[int] = []

    def warned(job: Job) -> Ending:
        signal.raise_signal(number)
        return Ending(code=0, reason="")

    monkeypatch.chdir(site.root)
    monkeypatch.setattr(round_module, "run", warned)
    before = signal.signal(number, lambda number, _: ended_by.append(number))  # by default it ends the process
    try:
        told = ["--model", site.root, "--settings", site.root / "settings.json", "--round", 0, "--out", "update"]
        assert round_module.main([*map(str, told), "--dataset", str(site.root / "data")]) == 0
    finally:
        signal.signal(number, before)
    assert not ended_by


@pytest.mark.slow
def test_the_same_round_again_is_not_trained_twice(site: Site):
    model = site.send()
    result, update = site.run(model)
    assert result.returncode == 0 and "launch:" in result.stderr, result.stderr
    content = verify_manifest(update).content_sha256

    shutil.rmtree(update.parent)  # the coordinator restarts: another job, another directory, the same round
    again, second = site.run(model)
    assert again.returncode == 0 and "not trained again" in again.stderr and "launch:" not in again.stderr
    assert verify_manifest(second).content_sha256 == content

    altered = next(p for p in (site.root / "state").rglob("*.safetensors") if "finished" in p.parts)
    altered.unlink()
    altered.write_bytes(b"0" * 100)
    third, update = site.run(model)
    assert third.returncode == 0 and "launch:" in third.stderr, "a damaged update is trained again"
    assert verify_manifest(update).content_sha256 == content


@pytest.mark.parametrize(
    "change", ["model", *(pytest.param(change, marks=pytest.mark.slow) for change in ("settings", "data"))]
)
def test_another_model_other_settings_or_other_data_are_trained(site: Site, change: str):
    site.run(site.send())
    if change == "settings":
        write_settings(site.root / "settings.json", ranks=2, steps=4)
    if change == "data":
        shutil.rmtree(site.root / "data")
        write_dataset(site.root / "data", train=41)
    result, _ = site.run(site.send(seed=1 if change == "model" else 0))
    assert result.returncode == 0 and "launch:" in result.stderr


def test_a_finished_update_is_known_by_what_the_settings_ask_for(tmp_path: Path):
    """An update of CrossFed wrote the same settings with a key that was new, and every facility that had finished its
    round trained it again, from a new optimizer, for the state before had gone."""

    def key(**training: object) -> str:
        return key_of("base", write_settings(tmp_path / "settings.json", **training), tmp_path)

    before, defaults = key(), TrainingSettings()
    assert key(unsent_share=defaults.unsent_share, lora={"rank": defaults.lora.rank}) == before
    others = [key(learning_rate=1e-4), key(unsent_share=0.25), key(lora={"rank": 4}), key(lora={"rank": 8})]
    assert len({before, *others, key(freeze=["a"]), key(freeze=["b"])}) == 7


def test_what_another_module_trains_without_the_stated_privacy_does_not_leave(site: Site):
    settings = json.loads((site.root / "settings.json").read_text())
    settings["training"]["ranks"] = 1
    differential = {"differential": {"epsilon": 2.0, "delta": 1e-3}}
    (site.root / "settings.json").write_text(json.dumps(settings | differential))
    result, update = site.run(site.send())
    failure = read_failure(update)
    assert result.returncode == 7 and failure is not None, result.stderr
    assert "tests.stand_in_trainer does not report that it kept it, so nothing leaves" in failure.reason


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("raise", "RuntimeError: the stand-in was told to fail"),
        ("rank1:raise", "rank 1 ended with exit code 1: RuntimeError"),
        pytest.param("nothing", "is not there: expected a directory with a manifest.json", marks=pytest.mark.slow),
        pytest.param("wrong-round", "expected ('update', 'pico', 'north', 0)", marks=pytest.mark.slow),
        ("code:7", "exit code 7"),
        pytest.param("code:3", "exit code 3", marks=pytest.mark.slow),
    ],
)
def test_every_way_to_fail_is_told(site: Site, mode: str, reason: str):
    site.environment["STAND_IN"] = mode
    result, update = site.run(site.send())
    assert result.returncode == 7
    failure = read_failure(update)
    assert failure is not None and reason in failure.reason, failure
    assert [p.name for p in update.iterdir()] == ["failure.json"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda m: (m / "model.safetensors").write_bytes(b"short"), "truncated"),
        (lambda m: (m / "manifest.json").unlink(), "holds no manifest.json"),
        (lambda m: (m / "manifest.json").write_text("{"), "cannot be read"),
    ],
)
def test_a_damaged_model_is_refused_with_the_reason(site: Site, damage, reason: str):
    model = site.send()
    damage(model)
    result, update = site.run(model)
    assert result.returncode == 7
    failure = read_failure(update)
    assert failure is not None and reason in failure.reason and failure.facility == "north" and not failure.again
    assert [p.name for p in update.iterdir()] == ["failure.json"]


def test_a_missing_dataset_and_unreadable_settings_are_told(site: Site):
    result, update = site.run(site.send(), dataset="/nowhere/data")
    failure = read_failure(update)
    assert result.returncode == 7 and failure is not None and "/nowhere/data" in failure.reason
    (site.root / "settings.json").write_text("{")
    result, update = site.run(site.send())
    failure = read_failure(update)
    assert result.returncode == 7 and failure is not None and "settings.json" in failure.reason


def children_with(word: str, parent: int) -> list[int]:
    """Processes below `parent` whose command line holds `word`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
                above = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if word in command and above == parent:
                found.append(int(entry.name))
    return found


def start(site: Site, *more: str, mode: str = "wait") -> tuple[Started, Path, list[int]]:
    """A long round, running, and the processes of its ranks."""
    site.environment["STAND_IN"] = mode
    command, job = site.command(site.send(), *STAND_IN, *more)
    process = site.start(command, job)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.process.is_alive() and process.printed().count("step") < 2:
        time.sleep(0.1)
    ranks = children_with("stand_in", process.process.pid)
    assert len(ranks) == 2, process.printed()
    return process, job / "update", ranks


def gone(pids: list[int]) -> bool:
    """Ended, even if nobody has collected their exit codes yet."""
    return all(started_at(pid) is None for pid in pids)


def test_time_running_out_is_told_as_such(site: Site):
    process, update, ranks = start(site, mode="come-back")
    process.signal(signal.SIGUSR1)
    assert process.ended().returncode == 7
    failure = read_failure(update)
    assert failure is not None and failure.again and gone(ranks)


def test_being_asked_to_end_is_told_where_there_is_time(site: Site):
    process, update, ranks = start(site)
    process.signal(signal.SIGTERM)
    assert process.ended().returncode == 7
    failure = read_failure(update)
    assert failure is not None and "SIGTERM" in failure.reason and gone(ranks)


def test_a_second_job_of_the_same_round_waits_for_the_first_and_takes_its_update(site: Site):
    process, _, ranks = start(site)
    site.environment["STAND_IN"] = "train"
    command, job = site.command(next(site.root.glob("work/*/model")), *STAND_IN)
    second = subprocess.Popen(command, cwd=job, env=os.environ | site.environment)
    time.sleep(1.5)
    assert second.poll() is None and not children_with("stand_in", second.pid)
    process.kill()
    assert second.wait(timeout=200) == 0 and gone(ranks)
    verify_manifest(job / "update")


def test_a_killed_rank_takes_the_others_down_and_is_told(site: Site):
    process, update, ranks = start(site)
    os.kill(ranks[1], signal.SIGKILL)
    assert process.ended().returncode == 7
    failure = read_failure(update)
    assert failure is not None and "SIGKILL" in failure.reason and "rank" in failure.reason and failure.log_tail
    assert gone(ranks)


@pytest.mark.parametrize("kept", [False, True])
def test_what_an_error_printed_leaves_only_where_a_jobs_output_may(site: Site, kept: bool):
    """The text of an error can be a document, which `job_output: false` of a gate keeps here."""
    write_settings(site.root / "settings.json", ranks=1)
    command, job = site.command(site.send(), *STAND_IN)
    environment = {"STAND_IN": "raise"} | ({"CROSSFED_JOB_OUTPUT": "0"} if kept else {})
    done = site.start(command, job, **environment).ended()
    failure = read_failure(job / "update")
    assert done.returncode == 7 and failure is not None and "told to fail" in done.stderr + done.stdout
    assert failure.reason.startswith("the training process ended with exit code 1: RuntimeError")
    assert ("told to fail" in failure.reason, "told to fail" in failure.log_tail) == (not kept, not kept)


def task(number: int) -> dict[str, str]:
    """Environment of one of two tasks, one a node, of a Slurm job."""
    return {
        "SLURM_JOB_ID": "4712",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(number),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_NODELIST": "localhost,other",
    }


@pytest.mark.parametrize(
    ("mode", "gated"), [("train", True), pytest.param("rank1:raise", False, marks=pytest.mark.slow)]
)
def test_the_first_of_two_nodes_speaks_for_both(site: Site, mode: str, gated: bool):
    """Behind a gate by notes that are not in the job's directory, which the coordinator writes."""
    write_settings(site.root / "settings.json", ranks=1)
    command, job = site.command(site.send(), *STAND_IN)
    environment = os.environ | site.environment | {"STAND_IN": mode, "CROSSFED_RANKS_PER_NODE": "1,1"}
    if gated:
        environment[PLACE] = str(site.root / "notes")
    both = [
        subprocess.Popen(command, cwd=job, env=environment | task(number), stderr=subprocess.PIPE, text=True)
        for number in range(2)
    ]
    told = [process.communicate(timeout=200)[1] for process in both]
    assert [bool(list(place.glob(".launch-*"))) for place in (job, site.root / "notes")] == [not gated, gated], told
    if mode == "train":
        assert [p.returncode for p in both] == [0, 0] and verify_manifest(job / "update"), told
        return
    assert [p.returncode for p in both] == [7, 7], told
    failure = read_failure(job / "update")
    assert failure is not None and failure.reason == (
        "on node 1: the training process ended with exit code 1: RuntimeError: the stand-in was told to fail"
    )
    assert "RuntimeError" in failure.log_tail


def test_a_time_limit_ends_a_round(site: Site):
    process, update, ranks = start(site, "--time-limit", "12", "--grace", "2")
    assert process.ended().returncode == 7
    assert (failure := read_failure(update)) is not None and ("limit" in failure.reason or failure.again)
    assert gone(ranks)


@pytest.mark.slow
def test_killing_the_round_itself_leaves_no_rank_and_no_update(site: Site):
    process, update, ranks = start(site)
    process.kill()
    deadline = time.monotonic() + 200
    while not gone(ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert gone(ranks) and not update.exists()


def test_a_requeued_job_clears_what_its_first_start_left(site: Site):
    model = site.send()
    command, job = site.command(model, *STAND_IN)
    (job / "update").mkdir()
    (job / "update" / "failure.json").write_text("{}")
    assert site.start(command, job).ended().returncode == 0
    verify_manifest(job / "update")


SETTINGS = FacilitySettings(federation="test", facility="north", rounds=9, seed=0)


def test_directories_of_jobs_ten_rounds_ago_are_removed_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The engine never removes any: two a round would be there for ever, with what the trainer left in TMPDIR."""
    work = tmp_path / "work"

    def settings(federation: str = "f", facility: str = "a", behind: int = 0) -> FacilitySettings:
        return FacilitySettings(federation=federation, facility=facility, rounds=100, seed=0, behind=behind)

    def job(round: int, whose: FacilitySettings, temporary: Path | None = None) -> tuple[Path, Path]:
        place = work / str(uuid.uuid4())
        temporary = temporary or work / str(uuid.uuid4())
        for directory in (place, temporary / "torchinductor_me"):
            directory.mkdir(parents=True)
        (place / "job.log").write_text("hours of it")
        monkeypatch.setenv("TMPDIR", str(temporary))
        note_job(place, whose, round)
        return place, temporary

    jobs = {round: job(round, settings()) for round in range(25)}
    others = [*job(0, settings(facility="b")), *job(0, settings(federation="g")), *job(99, settings())]
    kept_elsewhere, scratch = job(0, settings(), tmp_path / "scratch")
    own, temporary = job(25, settings())
    model = Manifest(kind="model", federation="f", round=25)
    assert sweep_jobs(own, settings(behind=11), 25, model) == sorted([jobs[n][0] for n in range(13)] + [kept_elsewhere])
    assert set(sweep_jobs(own, settings(), 100, model)) == {jobs[n][0] for n in range(13, 16)}
    left = [path for n in range(16, 25) for path in jobs[n]]
    assert sorted(work.iterdir()) == sorted([*left, *others, own, temporary]) and scratch.exists()
    (jobs[16][0] / NOTE).write_text("[" * 4000)
    (jobs[17][0] / NOTE).write_text('{"federation": "f", "facility": "a", "round": 0, "temporary": "../scratch"}')
    assert sweep_jobs(own, settings(), 25, model) == [jobs[17][0]] and scratch.exists() and jobs[16][0].exists()


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("transferred", [False, True], ids=["made by a job", "copied for a job"])
def test_the_sweep_removes_only_our_old_models_and_updates(tmp_path: Path, behind: int, transferred: bool):
    work = tmp_path / "work"
    kept: list[Path] = []

    def put(name: str, parent: str | None = None, **values) -> Path:
        holder = work / (parent or str(uuid.uuid4()))
        directory = (holder / str(uuid.uuid4()) if transferred and not parent else holder) / name
        directory.mkdir(parents=True)
        (directory / "weights.bin").write_bytes(b"w")
        if values:
            write_manifest(directory, Manifest(**({"kind": "model", "federation": "test"} | values)))
        return directory

    old = [put("model", round=0), put("update", kind="update", facility="north", round=3), put("a b'c", round=3)]
    old += [put("model", facility="north", round=0), put("update", kind="update", facility="north", round=4)]
    previous = put("model", round=4)
    (kept if behind else old).append(previous)
    kept += [
        put("model", round=5),
        put("update", kind="update", facility="north", round=5),
        put("update", kind="update", facility="south", round=0),
        put("model", federation="other", round=0),
        put("model"),
        put("model", parent="my-own-models", round=0),
        put("deep/model", round=0),
        put("model", facility="south", round=0),
    ]
    broken = put("model", round=0)
    (broken / "manifest.json").write_text("{}")
    outside = tmp_path / "outside" / "model"
    outside.mkdir(parents=True)
    write_manifest(outside, Manifest(kind="model", federation="test", round=0))
    (work / str(uuid.uuid4())).symlink_to(outside.parent)
    linked = work / str(uuid.uuid4())
    linked.mkdir()
    (linked / "model").symlink_to(outside)
    job = work / str(uuid.uuid4())
    (job / "model").mkdir(parents=True)
    write_manifest(job / "model", Manifest(kind="model", federation="test", round=0))

    before = {path: sha256_of(path) for path in tmp_path.rglob("*") if path.is_file()}
    removed = remove_old_rounds(job, replace(SETTINGS, behind=behind), 5)
    assert sorted(removed) == sorted(old)
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in [*kept, broken, outside, linked / "model", job / "model"])
    after = {path: sha256_of(path) for path in tmp_path.rglob("*") if path.is_file()}
    assert after == {path: digest for path, digest in before.items() if not any(path.is_relative_to(o) for o in old)}


@pytest.mark.parametrize("behind", [0, 2])
def test_the_sweep_keeps_the_model_that_is_evaluated_after_an_early_end(tmp_path: Path, behind: int):
    """A deadline or a budget ended the federation before its last round: the final evaluation has the number of rounds,
    and its model that of the round that was to follow."""
    done = SETTINGS.rounds - 3
    job = tmp_path / str(uuid.uuid4())
    job.mkdir()
    places = {}
    for number in range(done + 1):
        directory = tmp_path / str(uuid.uuid4()) / str(uuid.uuid4()) / "model"
        directory.mkdir(parents=True)
        write_manifest(directory, Manifest(kind="model", federation=SETTINGS.federation, round=number))
        places[number] = directory
    remove_old_rounds(job, replace(SETTINGS, behind=behind), SETTINGS.rounds, read_manifest(places[done]))
    assert {number for number, path in places.items() if path.exists()} == set(range(max(0, done - behind), done + 1))


def test_the_sweep_does_nothing_where_no_engine_made_the_directory(tmp_path: Path):
    victim = tmp_path / str(uuid.uuid4()) / "model"
    victim.mkdir(parents=True)
    write_manifest(victim, Manifest(kind="model", federation="test", round=0))
    job = tmp_path / "by-hand"
    job.mkdir()
    assert remove_old_rounds(job, SETTINGS, 5) == [] and victim.exists()


@pytest.mark.parametrize(
    ("round", "left"),
    [
        (3, {"round-3", "paused", "residual", "residual/round-3"}),
        (4, {"round-3", "paused", "residual", "residual/round-3"}),
    ],
    ids=["a round of training", "the final evaluation, which keeps no state"],
)
def test_once_a_round_is_kept_one_optimizer_state_and_one_residual_stay(tmp_path: Path, round: int, left: set[str]):
    for name in ("round-2", "round-3", "residual/round-1", "residual/round-3", "paused"):
        (tmp_path / name).mkdir(parents=True)
    forget_earlier(tmp_path, round)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == left


def test_help_says_units_and_defaults(tmp_path: Path):
    text = help_of("facility.round", tmp_path / "said")
    assert "SECONDS" in text and "default 600" in text
    assert json.dumps(text)


@pytest.mark.parametrize(
    ("asked", "most", "taken"),
    [
        ({"north": 7}, 7, 7),
        ({"north": 7}, 6, 1),
        pytest.param({"north": 7}, 0, 1, marks=pytest.mark.slow),
        pytest.param({"south": 7}, 9, 1, marks=pytest.mark.slow),
        ({"north": "rm"}, 9, 1),
    ],
)
def test_the_trainer_is_told_the_steps_that_the_model_asks_of_this_facility_and_its_settings_allow(
    site: Site, asked: dict, most: int, taken: int
):
    settings = json.loads((site.root / "settings.json").read_text())
    (site.root / "settings.json").write_text(json.dumps(settings | {"most_steps": most}))
    model = site.send()
    with_extra(model, "steps", asked)
    result, update = site.run(model)
    assert result.returncode == 0, result.stderr
    assert json.loads((update / "report.json").read_text())["steps"] == taken
