"""Laws of starting ranks: they all end, the first failure is told, devices are found without vendors' tools."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from facility.exchange.errors import ConfigurationError
from facility.launch import MOST_RANKS, wanted_ranks
from facility.launching.devices import clean_environment, detect_devices, listed_devices
from facility.launching.notes import Notes
from facility.launching.place import read_tasks
from facility.launching.supervise import Limits, supervise_ranks
from tests.conftest import ROOT
from tests.ports import free_port

RANK = """
import os, signal, subprocess, sys, time
rank, what = os.environ["RANK"], sys.argv[1:]
print("rank", rank, "of", os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], flush=True)
if "child" in what:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", "straggler"])
if f"fail{rank}" in what:
    raise ValueError("deliberate")
if f"late{rank}" in what:
    time.sleep(1); raise OSError("connection closed by peer")
for word in what:
    if word.startswith("code"):
        sys.exit(int(word[4:]))
if "real-time" in what:
    os.kill(os.getpid(), 40)
if "deaf" in what:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if f"saves{rank}" in what:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
if "usr1" in what:
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(85))
    print("ready", flush=True)
if "chatty" in what:
    while not os.path.exists("unheard"):
        time.sleep(0.05)
    for _ in range(3):
        print("step", flush=True); time.sleep(0.2)
    open("done", "w").close()
if "stay" in what:
    time.sleep(300)
"""


def launch(tmp_path: Path, options: list[str], what: list[str], **environment: str) -> subprocess.Popen[str]:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SLURM", "PBS", "FLUX", "OMPI", "PMI", "MASTER", "OMP_"))
    }
    return subprocess.Popen(
        [sys.executable, "-m", "facility.launch", *options, "--", str(script), *what],
        cwd=tmp_path,
        env=clean | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 200) -> tuple[int, str]:
    output, _ = process.communicate(timeout=seconds)
    return process.returncode, output


def stragglers(tmp_path: Path) -> list[int]:
    """Processes that run in `tmp_path`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and os.readlink(entry / "cwd") == str(tmp_path)
                and (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def left_in(tmp_path: Path, seconds: float = 60) -> list[int]:
    """Processes that still run in `tmp_path` after `seconds`: one that was killed takes the kernel a while to end."""
    deadline = time.monotonic() + seconds
    while (left := stragglers(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def test_ranks_start_and_share_the_cores(tmp_path: Path):
    code, output = finish(launch(tmp_path, ["--ranks", "3"], []))
    threads = max(1, len(os.sched_getaffinity(0)) // 3)
    assert code == 0 and all(f"[rank {rank}] rank {rank} of 3 {threads}\n" in output for rank in range(3))


def test_a_python_before_its_arguments_is_refused_with_the_way_to_write_it(tmp_path: Path):
    """A rank ended with "can't open file 'python'"; the documentation had a command with it."""
    command = [sys.executable, "-m", "facility.launch", "--", "python", "-m", "facility.train"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.endswith("arguments, such as -- -m facility.train\n")


def test_the_first_failure_is_told_and_ends_the_others(tmp_path: Path):
    code, output = finish(launch(tmp_path, ["--ranks", "3", "--grace", "3"], ["fail1", "child", "late0", "stay"]))
    assert code == 1
    told = output[output.index("launch: rank") :]
    assert (
        told.startswith("launch: rank 1 ended with exit code 1: ValueError: deliberate")
        and "connection closed" not in told
    )
    assert left_in(tmp_path) == []


def test_a_rank_that_does_not_listen_is_killed_in_the_stated_time(tmp_path: Path):
    code, _ = finish(launch(tmp_path, ["--ranks", "2", "--grace", "2"], ["fail1", "deaf", "stay"]))
    assert code == 1 and left_in(tmp_path) == []


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path: Path):
    """The launcher ended with a traceback, and the ranks that were left with nothing to watch over them."""
    code, output = finish(launch(tmp_path, ["--ranks", "2", "--grace", "1"], ["real-time"]))
    assert code == 128 + 40 and "was ended by signal 40" in output and "Traceback" not in output


@pytest.mark.parametrize("code", [0, 7, 85, 3])
def test_the_ranks_own_code_is_kept(tmp_path: Path, code: int):
    assert finish(launch(tmp_path, ["--ranks", "2"], [f"code{code}"]))[0] == code


def test_limits_of_time_and_silence(tmp_path: Path):
    for option, words in (("--time-limit", "ran longer"), ("--silence", "said nothing")):
        code, output = finish(launch(tmp_path, ["--ranks", "2", option, "2", "--grace", "1"], ["stay"]))
        assert code == 124 and words in output and left_in(tmp_path) == []


def test_a_limit_at_which_one_rank_has_saved_its_round_is_no_fault_of_those_that_had_to_be_killed(tmp_path: Path):
    """The mid-round checkpoint is there: the job may be asked for again."""
    options = ["--ranks", "2", "--time-limit", "4", "--grace", "2"]
    code, output = finish(launch(tmp_path, options, ["deaf", "saves0", "stay"]))
    assert code == 85 and left_in(tmp_path) == [], output


def test_signals_are_passed_on(tmp_path: Path):
    process = launch(tmp_path, ["--ranks", "2"], ["usr1", "stay"])
    assert process.stdout is not None
    ready = 0
    while ready < 2:
        ready += "ready" in process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    assert finish(process)[0] == 85


def test_a_signal_that_comes_while_a_rank_is_made_reaches_it(monkeypatch: pytest.MonkeyPatch):
    """Before the rank was among those that a signal is passed on to, it trained on until `save` was over."""
    real = subprocess.Popen

    def made(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = real(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr("facility.launching.supervise.subprocess.Popen", made)
    command = [sys.executable, "-c", "import time; time.sleep(60); print('slept')"]
    out = io.BytesIO()
    ended = supervise_ranks(command, [dict(os.environ)] * 2, limits=Limits(), out=out)
    assert ended.code == 128 + signal.SIGTERM and b"slept" not in out.getvalue()


def test_a_child_whose_parent_died_before_it_could_ask_to_end_with_it_ends(tmp_path: Path):
    """As a rank of a job that was killed while it was made: nothing would have ended it."""
    parent = """
import os, subprocess, sys, time
from facility.exchange.child import end_with_parent
import signal
ask, parent = end_with_parent(signal.SIGKILL), os.getpid()

def late():
    open("forked", "w").close()
    while os.getppid() == parent:
        time.sleep(0.02)
    ask()

subprocess.Popen([sys.executable, "-c", "open('ran', 'w').close(); import time; time.sleep(60)"], preexec_fn=late)
"""
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 200
    while not (tmp_path / "forked").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    time.sleep(1.5)
    assert not (tmp_path / "ran").exists()


def test_a_round_whose_reader_is_gone_is_trained_to_its_end(tmp_path: Path):
    """As a job on the coordinator's own machine, once `crossfed run` was killed."""
    process = launch(tmp_path, ["--ranks", "1"], ["chatty"])
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    (tmp_path / "unheard").touch()
    assert process.wait(timeout=200) == 0 and (tmp_path / "done").is_file()


def test_killing_the_launcher_leaves_nothing(tmp_path: Path):
    process = launch(tmp_path, ["--ranks", "2"], ["stay"], TMPDIR=str(tmp_path))
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    process.kill()
    process.wait()
    assert left_in(tmp_path) == []
    (meeting,) = (one for one in tmp_path.iterdir() if one.is_dir())
    assert finish(launch(tmp_path, ["--ranks", "2"], [], TMPDIR=str(tmp_path)))[0] == 0
    assert not meeting.exists(), "in the node's memory, where TMPDIR has no locks, it stayed until the node began anew"
    assert {one.name for one in tmp_path.iterdir()} == {"rank.py"}


def node(number: int, nodes: int = 2) -> dict[str, str]:
    """Environment of one of several tasks, one a node."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": str(number),
        "SLURM_STEP_NUM_TASKS": str(nodes),
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NODELIST": "localhost,other",
    }


def test_nodes_with_unequal_ranks_find_each_other_through_files(tmp_path: Path):
    port = str(free_port())
    both = [
        launch(tmp_path, ["--ranks", str(ranks)], [], MASTER_PORT=port, **node(number))
        for number, ranks in enumerate((1, 2))
    ]
    outputs = [finish(process) for process in both]
    assert [code for code, _ in outputs] == [0, 0]
    assert "rank 0 of 3" in outputs[0][1] and "rank 1 of 3" in outputs[1][1] and "rank 2 of 3" in outputs[1][1]


def test_a_failure_on_one_node_ends_the_other(tmp_path: Path):
    port = str(free_port())
    both = [
        launch(tmp_path, ["--ranks", "1"], ["fail1", "stay"], MASTER_PORT=port, **node(number)) for number in range(2)
    ]
    outputs = [finish(process) for process in both]
    assert [code for code, _ in outputs] == [1, 1]
    assert (
        "another node failed first: the training process ended with exit code 1: ValueError: deliberate"
        in outputs[0][1]
    )


def test_a_taken_master_port_is_told(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        first = launch(tmp_path, [], [], MASTER_PORT=port, CROSSFED_RANKS_PER_NODE="1,1", **node(0))
        code, output = finish(first)
    assert code == 75 and f"port {port} on {socket.gethostname()} is taken" in output


def test_a_job_started_on_one_of_its_nodes_only_is_refused(tmp_path: Path):
    code, output = finish(launch(tmp_path, [], [], SLURM_JOB_ID="1", SLURM_JOB_NODELIST="n[1-4]"))
    assert code == 2 and "started on one of them only" in output


def test_notes_of_another_attempt_are_not_read(tmp_path: Path):
    Notes(tmp_path, "1", "0").write("first", "train")
    assert Notes(tmp_path, "1", "1").read("first") is None and Notes(tmp_path, "1", "0").read("first") == "train"


def machine(root: Path, nvidia: int = 0, amd: int = 0) -> Path:
    """Driver files of a machine."""
    (root / "dev").mkdir(parents=True)
    for number in range(nvidia):
        (root / "dev" / f"nvidia{number}").touch()
    (root / "dev/nvidiactl").touch()
    for number in range(amd + 1):
        place = root / "sys/class/kfd/kfd/topology/nodes" / str(number)
        place.mkdir(parents=True)
        (place / "properties").write_text(f"cpu_cores_count 1\nsimd_count {0 if number == 0 else 440}\n")
    if amd:
        (root / "dev/kfd").touch()
    return root


@pytest.mark.parametrize(
    ("nvidia", "amd", "environment", "expected"),
    [
        (0, 0, {}, ("cpu", 0)),
        (4, 0, {}, ("nvidia", 4)),
        (4, 0, {"CUDA_VISIBLE_DEVICES": "0,2"}, ("nvidia", 2)),
        (4, 0, {"CUDA_VISIBLE_DEVICES": "GPU-1f,MIG-2"}, ("nvidia", 2)),
        (4, 0, {"CUDA_VISIBLE_DEVICES": ""}, ("cpu", 0)),
        (4, 0, {"CUDA_VISIBLE_DEVICES": "-1"}, ("cpu", 0)),
        (0, 8, {}, ("amd", 8)),
        (0, 8, {"ROCR_VISIBLE_DEVICES": "4,5"}, ("amd", 2)),
        (0, 8, {"HIP_VISIBLE_DEVICES": "4"}, ("amd", 1)),
        (0, 0, {"CUDA_VISIBLE_DEVICES": "0,1"}, ("cpu", 0)),
    ],
)
def test_devices(tmp_path: Path, nvidia: int, amd: int, environment: dict, expected: tuple[str, int]):
    found = detect_devices(environment, machine(tmp_path / "m", nvidia, amd))
    assert (found.kind, found.count) == expected and found.reason


def test_amd_filters_do_not_apply_twice():
    environment = {name: "4,5" for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")}
    assert clean_environment(environment, "amd")[0] == {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""}
    assert (
        clean_environment(environment, "nvidia")[0] == {}
        and clean_environment({"HIP_VISIBLE_DEVICES": "4"}, "amd")[0] == {}
    )
    assert listed_devices("0,1,-1,2") == ["0", "1"]


@pytest.mark.parametrize("ranks", [MOST_RANKS, 10**6, 10**300])
def test_settings_start_no_more_processes_than_a_node_has_use_for(ranks: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    here, devices = read_tasks({}), detect_devices({"CUDA_VISIBLE_DEVICES": ""})
    if ranks == MOST_RANKS:
        assert wanted_ranks(here, devices, ranks, False)[0] == MOST_RANKS
        return
    with pytest.raises(ConfigurationError, match="ranks are asked for on this node, expected at most 256"):
        wanted_ranks(here, devices, ranks, False)
    monkeypatch.setattr(os, "cpu_count", lambda: 10**6)
    if ranks == 10**6:
        assert wanted_ranks(here, devices, ranks, False)[0] == ranks
