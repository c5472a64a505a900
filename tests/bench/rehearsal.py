"""Rehearsals of federations of large models on this machine, through StreamFlow to their end. Prints JSON.

    python tests/bench/rehearsal.py perturb --size 1.1b [--facilities 3] [--rounds 3] [--transfer ssh] [--work DIR]
        [--out FILE]
    python tests/bench/rehearsal.py adapters --size 8b
    python tests/bench/rehearsal.py lora --size 1.1b --facilities 2 --rounds 2 [--device cuda] [--minutes 5]
    python tests/bench/rehearsal.py full --size 1.1b --facilities 2 --rounds 2 --device cuda

perturb   whole models; the trainer is a stand-in that changes the lowest bits (`perturbing_trainer.py`), everything
          else is what a user runs
adapters  LoRA whose base stays at the facilities, a sparse file of the size's real shape; adapters alone travel; the
          trainer is the same stand-in
lora      `facility.train` itself: LoRA of rank 8 on q_proj and v_proj of a base that stays at the facilities
full      `facility.train` of the whole model, by Adafactor

On a CPU `facility.train` makes one step of one short sequence a round, on a GPU eight steps of four sequences of 1,024
tokens. Random weights are drawn on the device. All facilities are on this machine and train side by side; with
`--transfer ssh` they are reached through an sshd of their own, and everything is copied through it.

Reported: seconds by phase, of every round at the coordinator (the record's own) and at the facilities; the largest
resident set, seconds and bytes by kind of process; memory of the trainer beside its prediction; the largest use of disk
beside the bound that `crossfed check` states; bytes that travelled. With --minutes the run is stopped when they are
over, and `ended` says so; what rounds are complete is reported. The folder is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from coordinator.archive.rounds import Archive, RoundFile
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.memory.figures import model_figures
from coordinator.preflight.disk import coordinator_disk, facility_disk
from coordinator.rounds.verification import averages_encoded
from facility.exchange.messages.layout import LoraSettings
from tests.bench.large_models import SHAPES, Shape, write_adapters, write_model, write_sparse_base
from tests.bench.own_sshd import OwnSshd, own_sshd
from tests.bench.watch import Watch, descendants, used
from tests.engine.engines import measured_environment
from tests.federations import write_dataset

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("perturb", "adapters", "lora", "full")
STAND_IN = ("perturb", "adapters")
LORA = LoraSettings(rank=8, targets=["q_proj", "v_proj"])
GRACE_SECONDS = 15.0
AT_FACILITIES = ("trainer", "round", "launch", "train")


def training_of(kind: str, device: str) -> dict[str, Any]:
    """The training section: little on a CPU, a real batch on a GPU."""
    on_gpu = device == "cuda" and kind not in STAND_IN
    training: dict[str, Any] = {
        "steps": 8 if on_gpu else 1,
        "batch_sequences": 4 if on_gpu else 1,
        "learning_rate": 1e-4,
        "threads": 1,
        "evaluation_sequences": 1,
    }
    if on_gpu:
        training |= {"micro_batch_sequences": 1, "device": "cuda"}
    if on_gpu and kind == "lora":  # frozen weights in half precision for one block at a time: two fit side by side
        training["layout"] = {"activation_checkpointing": "full"}
    if kind not in STAND_IN:
        training["compute_dtype"] = "bfloat16"
    if kind == "full":
        training["optimizer"] = "adafactor"
    return training


def federation(
    root: Path,
    kind: str,
    shape: Shape,
    facilities: int,
    rounds: int,
    device: str = "cpu",
    sshd: OwnSshd | None = None,
) -> Path:
    """The model, the datasets and federation.yml of a rehearsal."""
    training = training_of(kind, device)
    if kind in ("perturb", "full"):
        write_model(root / "model", shape, device=device)
    else:
        training["lora"] = {"rank": LORA.rank, "targets": list(LORA.targets), "base": str(root / "base")}
        write_adapters(root / "model", shape, LORA)
        if kind == "lora":
            write_model(root / "base", shape, device=device)
        else:
            write_sparse_base(root / "base", shape)
    names, block_tokens = [f"site{number}" for number in range(facilities)], 1024 if device == "cuda" else 32
    for number, name in enumerate(names):
        folder = root / "sites" / name / "dataset"
        write_dataset(folder, seed=number, blocks=40, block_tokens=block_tokens, vocabulary_size=shape.vocabulary)
    described: dict[str, Any] = {
        "name": "rehearsal",
        "model": "../model",
        "rounds": rounds,
        "seed": 3,
        "archive": "../archive",
        "workdir": "../work",
        "keep_rounds": 1,
        "final_evaluation": False,
        "training": training,
        "aggregation": {"rule": "mean"},
        "facilities": [{"name": name, "dataset": str(root / "sites" / name / "dataset")} for name in names],
    }
    if sshd:
        for one in described["facilities"]:
            one["deployment"] = sshd.deployment
    if kind in STAND_IN:
        described["trainer"] = {"module": "tests.bench.perturbing_trainer"}
    path = root / "workflow" / "federation.yml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    return path


def stated_bound(path: Path) -> dict[str, int]:
    """What `crossfed check` says that disks need at most: the coordinator's, and each facility's."""
    described = read_federation(path)
    model = model_figures(path.parent / described.model)
    updates = {one.name: one.training for one in described.facilities}
    whole = coordinator_disk(
        model,
        updates,
        rule=described.aggregation.rule,
        rounds=described.rounds,
        keep_rounds=described.keep_rounds,
        decoded=not averages_encoded(described),
    )
    each = [facility_disk(model, training).bytes for training in updates.values()]
    return {"coordinator": whole.bytes, "a_facility": max(each)}


def needed(kind: str, size: str, facilities: int) -> int:
    """Bytes of disk that a rehearsal may take, models and bounds together, before anything is written."""
    weights = 2 * SHAPES[size].parameters
    if kind in STAND_IN[1:]:
        return 1 << 30
    if kind == "lora":
        return weights + (2 << 30)
    return (3 + 4 + facilities + (facilities if kind == "full" else 0)) * weights


def engine(
    root: Path, path: Path, device: str, minutes: float, sshd: OwnSshd | None = None
) -> tuple[Watch, int | None]:
    """Run the federation under StreamFlow, watched; its exit code, None where it was stopped in `minutes`."""
    environment = measured_environment(root / "engine") | {"OMP_NUM_THREADS": "1"}
    if device == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    over = threading.Event()
    with open(root / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "streamflow", "run", "--outdir", str(root / "engine" / "out"), "streamflow.yml"],
            cwd=path.parent,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        watch = Watch(pid=process.pid, root=root, disk=used(root), sshd=sshd and sshd.pid)
        thread = threading.Thread(target=watch.run, args=(over,))
        thread.start()
        try:
            return watch, process.wait(60 * minutes if minutes else None)
        except subprocess.TimeoutExpired:
            return watch, None
        finally:
            over.set()
            thread.join()
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the engine and everything below it."""
    below = [pid for pid, _ in descendants(process.pid)] if process.poll() is None else []
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)


def rehearse(
    root: Path,
    kind: str,
    size: str,
    facilities: int,
    rounds: int,
    *,
    device: str = "cpu",
    minutes: float = 0,
    sshd: OwnSshd | None = None,
) -> dict[str, Any]:
    """One federation to its end, or to the end of `minutes` (0: no limit), watched."""
    shape, began = SHAPES[size], time.perf_counter()
    path = federation(root, kind, shape, facilities, rounds, device, sshd)
    write_rendered(read_federation(path))
    made, before = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    (root / "engine").mkdir(exist_ok=True)
    begun, bounds, began = used(root), stated_bound(path), time.perf_counter()
    watch, code = engine(root, path, device, max(0.2, minutes - made / 60) if minutes else 0, sshd)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    done = Archive(read_federation(path).archive_path).history()
    sound = [row for entry in done for row in entry.facilities if row.status == "ok"]
    well = code == 0 and len(sound) == rounds * facilities
    ended = f"with code {code}, {len(sound)} of {rounds * facilities} updates averaged"
    memory = watch.memory()
    return {
        "kind": kind,
        "parameters": shape.parameters,
        "facilities": facilities,
        "rounds": rounds,
        "transfer": "ssh" if sshd else "local",
        "device": device_name(device),
        "ended": "well" if well else f"stopped after {minutes:.1f} minutes" if code is None else ended,
        "rounds_complete": len(done),
        "updates_averaged": len(sound),
        "seconds": round(seconds, 1),
        "seconds_to_make_the_model": round(made, 1),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "by_round": [of_round(entry) for entry in done],
        "processes": watch.by_kind(),
        "megabytes_of_memory": {name: round(value / 1e6) for name, value in sorted(memory.items())},
        "coordinator_largest_megabytes": round(
            max(value for name, value in memory.items() if not at_facility(name)) / 1e6
        ),
        "gigabytes_of_disk": {
            "before": round(begun / 1e9, 3),
            "at_most": round(watch.disk / 1e9, 3),
            "after": round(used(root) / 1e9, 3),
            "stated_bounds": {name: round(value / 1e9, 3) for name, value in bounds.items()},
            "over_stated": round((watch.disk - begun) / (bounds["coordinator"] + facilities * bounds["a_facility"]), 3),
        },
        **({} if well else {"log": (root / "log").read_text(errors="replace")[-3000:]}),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def at_facility(kind: str) -> bool:
    return kind in AT_FACILITIES or kind.startswith("facility: ")


def of_round(entry: RoundFile) -> dict[str, Any]:
    """Seconds by phase at the coordinator and at each facility, memory beside its prediction, bytes that travelled."""
    record = entry.aggregation
    return {
        "round": entry.round,
        "seconds": round(entry.seconds, 1),
        "averaging_seconds": {name: round(value, 2) for name, value in record.get("seconds", {}).items()},
        "averaging_bytes": {name: record.get(f"bytes_{name}") for name in ("read", "written")},
        "facilities": [
            {
                "status": row.status,
                **({"reason": row.reason} if row.reason else {}),
                "seconds": {name: round(value, 2) for name, value in row.phases.items()},
                "tokens_per_second": round(row.tokens_per_second, 1),
                "memory_measured": row.peak_memory_bytes,
                "memory_predicted": row.predicted_memory_bytes,
                "sent_bytes": row.sent_bytes,
                "received_bytes": row.received_bytes,
                "loss": [row.loss_received, row.loss_returned],
            }
            for row in entry.facilities
        ],
    }


def device_name(device: str) -> str:
    if device != "cuda":
        return device
    import torch

    return torch.cuda.get_device_name(0)


def in_a_folder(work: Path | None, *arguments: Any, transfer: str = "local", **options: Any) -> dict[str, Any]:
    """`rehearse` in a folder of its own below `work`, which is made; the folder is removed."""
    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="crossfed-rehearsal-", dir=work))
    try:
        if transfer == "local":
            return rehearse(root, *arguments, **options)
        with own_sshd(root / "sshd", root / "engine" / "home") as sshd:
            return rehearse(root, *arguments, sshd=sshd, **options)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--size", choices=SHAPES, default="tiny")
    parser.add_argument("--facilities", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--transfer", choices=("local", "ssh"), default="local", help="to the facilities (default local)"
    )
    parser.add_argument("--minutes", type=float, default=0, help="stop then and report what there is (default: 0, no)")
    parser.add_argument("--work", type=Path, help="where the folder is made (default: the system's temporary one)")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    a = parser.parse_args()
    asked = (a.kind, a.size, a.facilities, a.rounds)
    found = in_a_folder(a.work, *asked, device=a.device, minutes=a.minutes, transfer=a.transfer)
    text = json.dumps(found, indent=2)
    print(text)
    if a.out:
        a.out.write_text(text + "\n")
    return os.EX_OK if found["ended"] == "well" else 1


if __name__ == "__main__":
    sys.exit(main())
