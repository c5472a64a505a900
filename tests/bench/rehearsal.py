"""Rehearsals of federations of large models on this machine, through StreamFlow to their end. Prints JSON.

    python tests/bench/rehearsal.py perturb --size 1.1b [--facilities 3] [--rounds 3] [--work DIR] [--out FILE]
    python tests/bench/rehearsal.py adapters --size 8b
    python tests/bench/rehearsal.py lora --size 1.1b --facilities 2 --rounds 2

perturb   whole models; the trainer is a stand-in that changes the lowest bits (`perturbing_trainer.py`), everything
          else is what a user runs
adapters  LoRA whose base stays at the facilities, a sparse file of the size's real shape; adapters alone travel; the
          trainer is the same stand-in
lora      `facility.train` itself, one step of one short sequence a round, LoRA of rank 8 on q_proj and v_proj

Reported: seconds and CPU seconds; the largest resident set of each of the coordinator's processes and of the
facilities', the engine's among the first; the largest use of disk, and what lies there at the end, beside the bound
that `crossfed check` states; whether the archive holds every round and every facility's update. The folder is removed
at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from coordinator.engine.render import write
from coordinator.preflight.disk import coordinator_disk, facility_disk
from coordinator.preflight.estimates import model_figures
from facility.exchange.messages.layout import LoraSettings
from tests.bench.large_models import SHAPES, Shape, write_adapters, write_model, write_sparse_base
from tests.engine.engines import bare_environment
from tests.federations import write_dataset

LORA = LoraSettings(rank=8, targets=["q_proj", "v_proj"])
BLOCK_TOKENS = 32


@dataclass
class Watch:
    """Looks at the engine's processes and at the folder until the engine ends."""

    pid: int
    root: Path
    memory: dict[str, int] = field(default_factory=dict)
    """Largest resident set by kind of process."""
    disk: int = 0

    def run(self, over: threading.Event) -> None:
        looked = 0.0
        while not over.wait(0.1):
            for pid, parent in descendants(self.pid):
                kind, size = kind_of(pid, parent, self.pid), highest(pid)
                if size:
                    self.memory[kind] = max(self.memory.get(kind, 0), size)
            if time.monotonic() - looked > 2:
                self.disk, looked = max(self.disk, used(self.root)), time.monotonic()


def descendants(pid: int) -> list[tuple[int, int]]:
    """(process, parent) of a process and all below it."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(rest[1]), []).append(int(stat.parent.name))
    found, reached = [(pid, 0)], [pid]
    while reached:
        parent = reached.pop()
        for child in parents.get(parent, []):
            found.append((child, parent))
            reached.append(child)
    return found


def kind_of(pid: int, parent: int, engine: int) -> str:
    """`engine`, a step's name, `steps` (the process they are forked from), or `trainer`."""
    if pid == engine:
        return "engine"
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "others"
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    if module.endswith("step_server"):
        return "steps" if name == "crossfed-steps" else name
    if module in ("facility.train", "tests.bench.perturbing_trainer"):
        return "trainer"
    return module.rpartition(".")[2] or "others"


def highest(pid: int) -> int:
    """The largest resident set of a process so far, in bytes."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def used(root: Path) -> int:
    """Bytes of disk below a folder, each file once however many names it has."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, files in os.walk(root):
        for name in files:
            try:
                found = os.lstat(f"{folder}/{name}")
            except OSError:
                continue
            seen[(found.st_dev, found.st_ino)] = found.st_blocks * 512
    return sum(seen.values())


def federation(root: Path, kind: str, shape: Shape, facilities: int, rounds: int) -> Path:
    """The model, the datasets and federation.yml of a rehearsal."""
    training: dict[str, Any] = {
        "steps": 1,
        "batch_sequences": 1,
        "learning_rate": 1e-3,
        "threads": 1,
        "evaluation_sequences": 1,
    }
    if kind == "perturb":
        write_model(root / "model", shape)
    else:
        training["lora"] = {"rank": LORA.rank, "targets": list(LORA.targets), "base": str(root / "base")}
        write_adapters(root / "model", shape, LORA)
        if kind == "lora":
            write_model(root / "base", shape)
            training["compute_dtype"] = "bfloat16"
        else:
            write_sparse_base(root / "base", shape)
    names = [f"site{number}" for number in range(facilities)]
    for number, name in enumerate(names):
        folder = root / "sites" / name / "dataset"
        write_dataset(folder, seed=number, blocks=8, block_tokens=BLOCK_TOKENS, vocabulary_size=shape.vocabulary)
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
        "facilities": [{"name": name, "dataset": f"../sites/{name}/dataset"} for name in names],
    }
    if kind != "lora":
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
    )
    each = [facility_disk(model, training).bytes for training in updates.values()]
    return {"coordinator": whole.bytes, "a_facility": max(each)}


def rehearse(root: Path, kind: str, size: str, facilities: int, rounds: int) -> dict[str, Any]:
    """One federation to its end, watched."""
    shape = SHAPES[size]
    began = time.perf_counter()
    path = federation(root, kind, shape, facilities, rounds)
    write(read_federation(path))
    made, before = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    (root / "engine").mkdir()
    begun, over = used(root), threading.Event()
    began = time.perf_counter()
    with open(root / "log", "w") as log:
        process = subprocess.Popen(
            ["streamflow", "run", "--outdir", str(root / "engine" / "out"), "streamflow.yml"],
            cwd=path.parent,
            env=bare_environment(root / "engine") | {"OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        watch = Watch(pid=process.pid, root=root, disk=begun)
        thread = threading.Thread(target=watch.run, args=(over,))
        thread.start()
        try:
            code = process.wait()
        finally:
            process.kill()
            over.set()
            thread.join()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    done = Archive(read_federation(path).archive_path).history()
    sound = [row.status == "ok" for entry in done for row in entry.facilities]
    if code or len(done) != rounds or not all(sound):
        raise SystemExit(f"the rehearsal did not end well ({code}): {(root / 'log').read_text()[-3000:]}")
    coordinators = {name: value for name, value in watch.memory.items() if name not in ("trainer", "round")}
    return {
        "kind": kind,
        "parameters": shape.parameters,
        "facilities": facilities,
        "rounds": rounds,
        "updates_averaged": len(sound),
        "seconds": round(seconds, 1),
        "seconds_to_make_the_model": round(made, 1),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "megabytes_of_memory": {name: round(value / 1e6) for name, value in sorted(watch.memory.items())},
        "coordinator_largest_megabytes": round(max(coordinators.values()) / 1e6),
        "gigabytes_of_disk": {
            "before": round(begun / 1e9, 3),
            "at_most": round(watch.disk / 1e9, 3),
            "after": round(used(root) / 1e9, 3),
            "stated_bounds": {name: round(value / 1e9, 3) for name, value in stated_bound(path).items()},
        },
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("perturb", "adapters", "lora"))
    parser.add_argument("--size", choices=SHAPES, default="tiny")
    parser.add_argument("--facilities", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="where the folder is made (default: the system's temporary one)")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="crossfed-rehearsal-", dir=arguments.work))
    try:
        found = rehearse(root, arguments.kind, arguments.size, arguments.facilities, arguments.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    text = json.dumps(found, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
