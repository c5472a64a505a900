"""Time and memory of the aggregation by what the updates are, beside reading and writing the same bytes.

    python tests/bench/aggregate_kinds.py --work DIR [--kinds plain norms delta masked state] [--updates 2 4 16]
        [--dtype bfloat16] [--encoding delta-int8] [--layers 1] [--turns 3] [--cold] [--before ROOT] [--mergekit PYTHON]

`plain`: full updates, read twice where there are three or more, since all norms must be known before the first step is
added; `norms`: full updates that state the norms of their steps, read once; `delta`: messages of --encoding to a model
with a manifest, so that the SHA-256 of what is written is made as well; `masked`: 16 bits, whose masks the pass takes
off with one key for each update; `state`: `norms` with the rule nesterov, whose state is read and written and hashed
both times, as is the model that is written. Of messages and masked updates there are four at most, given again under
further names: their content changes no cost. `io` (of `state`: `io_state`) reads the same files and writes as many
bytes as the model (and the state) hold, with two threads and no arithmetic; it hashes nothing.

Contenders run turn about, each a process of its own. For each: wall and CPU seconds and peak resident MB of the whole
process, CPU seconds (`cpu`) and wall seconds (`wall`) of its passes, the last of which writes, and `durable`: wall
seconds from the begin of the first pass until all is synced to the disk and renamed (`io`: synced). Ratios are those of
the last pass over `io` in CPU and in wall seconds, and of `durable`; mergekit's whole process over ours in CPU and wall
seconds. Each is the median of the turns, or null where a turn is more than a fifth off it. --before names the root of
another checkout, measured in the same turns. `load`: the machine's average of the last minute, ours included.

--cold: what is read is dropped from the page cache before every contender, in a DIR on a real disk; every message and
masked update has bytes of its own then. A run that read less than nine tenths of them from the disk has failed. The
disk of a virtual machine may still be in the memory of its host.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from coordinator.aggregation.state import belong_to  # noqa: E402
from facility.exchange.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from facility.exchange.checkpoints.delta import encode_update  # noqa: E402
from facility.exchange.checkpoints.writer import Planned, TensorWriter, layout_of_shards  # noqa: E402
from facility.exchange.masking.streams import DTYPES as MASKED  # noqa: E402
from facility.exchange.messages.manifest import NAME, Manifest, read_manifest, write_manifest  # noqa: E402
from tests.bench import aggregate as averaging  # noqa: E402
from tests.bench.aggregate import DTYPES, WEIGHTS, make, measured, state_norms  # noqa: E402

VOCABULARY = 4000
DISTINCT = 4
SPREAD = 0.2
CHILD = """
import json, sys, time
root, specification = sys.argv[1:]
sys.path.insert(0, root)
from pathlib import Path
from coordinator.aggregation.request import Request
from coordinator.aggregation.run import aggregate
from coordinator.aggregation import kernel
from coordinator.aggregation.settings import AggregationSettings
given = json.loads(specification)
more = {"settings": AggregationSettings(rule="mean", weights=given["weights"])}
if given["kind"] == "masked":
    from coordinator.aggregation.unmasking import Unmasking
    names = sorted(given["updates"])
    more = {"settings": AggregationSettings(rule="mean"), "unmasking": Unmasking(
        bits=16, weights={name: 1 / len(names) for name in names}, survivors=names,
        seeds=[(-1, bytes([number + 1] * 32)) for number in range(len(names))], clips={}, default_clip=1.0)}
if given["kind"] == "state":
    state, out = Path(given["state"]), Path(given["state_out"])
    settings = AggregationSettings(rule="nesterov", weights=given["weights"])
    more = {"settings": settings, "state_in": state if state.exists() else None, "state_out": out}
cpu, wall, begun, run = [], [], [], kernel.run
def timed(*arguments, **named):
    begun.append(time.perf_counter())
    cpu_begun = time.process_time()
    found = run(*arguments, **named)
    cpu.append(round(time.process_time() - cpu_begun, 3))
    wall.append(round(time.perf_counter() - begun[-1], 3))
    return found
kernel.run = timed
updates = {n: Path(p) for n, p in given["updates"].items()}
aggregate(Request(base=Path(given["base"]), updates=updates, out=Path(given["out"]), **more))
print(json.dumps({"cpu": cpu, "wall": wall, "durable": round(time.perf_counter() - begun[0], 3)}))
"""
INPUT_OUTPUT = """
import json, os, sys, threading, time
out, size, *files = sys.argv[1:]
os.mkdir(out)
def in_two(work):
    threads = [threading.Thread(target=work, args=(part,)) for part in range(2)]
    [t.start() for t in threads]; [t.join() for t in threads]
def stream(part):
    buffer = memoryview(bytearray(8 << 20))
    left = int(size) // 2
    for file in files[part::2]:
        with open(file, "rb", buffering=0) as source:
            while source.readinto(buffer):
                pass
    with open(f"{out}/{part}", "wb", buffering=0) as output:
        while left:
            left -= output.write(buffer[: min(left, len(buffer))])
def settle(part):
    with open(f"{out}/{part}", "rb") as output:
        os.fsync(output.fileno())
begun, cpu_begun = time.perf_counter(), time.process_time()
in_two(stream)
cpu, wall = time.process_time() - cpu_begun, time.perf_counter() - begun
in_two(settle)
print(json.dumps({"cpu": [round(cpu, 3)], "wall": [round(wall, 3)], "durable": round(time.perf_counter() - begun, 3)}))
"""
"""Reads all files, writes `size` bytes, and waits until they are on disk, as the aggregation does before it renames."""
KINDS = ("plain", "norms", "delta", "masked", "state")
READ_OF_COLD = 0.9


def prepared(kind: str, base: Path, updates: list[Path], a: argparse.Namespace) -> dict[str, Path]:
    """The updates of a kind, by facility."""
    folder = a.work / (a.encoding if kind == "delta" else "norms" if kind == "state" else kind) / a.dtype
    _describe(base, updates, kind in ("delta", "state"))
    if kind == "plain":
        return {update.name: update for update in updates}
    made: list[Path] = []
    for update in updates if kind in ("norms", "state") or a.cold else updates[:DISTINCT]:
        made.append(folder / update.name)
        if made[-1].exists():
            continue
        if kind == "masked":
            _masked(base, made[-1], len(made))
        elif kind in ("norms", "state"):
            shutil.copytree(update, made[-1], copy_function=os.link)
            state_norms(base, [made[-1]])
        else:
            made[-1].parent.mkdir(parents=True, exist_ok=True)
            encode_update(full=update, reference=base, out=made[-1], encoding=a.encoding, norms=True)
    if kind == "state":
        _describe(base, made, True)
    if kind == "delta":
        made += [
            _renamed(made[number % DISTINCT], folder / updates[number].name)
            for number in range(len(made), len(updates))
        ]
    return {update.name: made[number % len(made)] for number, update in enumerate(updates)}


def _renamed(message: Path, out: Path) -> Path:
    """The same message as the update of another facility, with hard links to its tensors."""
    if not out.exists():
        shutil.copytree(message, out, copy_function=os.link)
        manifest = json.loads((out / "manifest.json").read_text())
        (out / "manifest.json").unlink()
        (out / "manifest.json").write_text(json.dumps(manifest | {"facility": out.name}))
    return out


def _describe(base: Path, updates: list[Path], described: bool) -> None:
    """Give the model and every update a manifest, or take them away: messages and a state refer to a model with one."""
    for number, path in enumerate((base, *updates)):
        if not described:
            (path / NAME).unlink(missing_ok=True)
        elif not (path / NAME).exists():
            kind, facility = ("update", path.name) if number else ("model", None)
            write_manifest(path, Manifest(kind=kind, federation="bench", round=0, facility=facility))


def _state(kind: str, base: Path, given: dict[str, Path], a: argparse.Namespace) -> Path:
    """The state of the rule nesterov that belongs to the base."""
    state = a.work / f"state-{a.dtype}"
    if kind == "state" and not state.exists():
        first = json.dumps(specification(kind, base, dict(list(given.items())[:1]), a) | {"state_out": str(state)})
        found = measured([sys.executable, "-c", CHILD, str(ROOT), first])
        if "failed" in found:
            raise SystemExit(f"no state was made: {found['failed']}")
        write_manifest(state, dataclasses.replace(read_manifest(state), round=0, files={}))
        belong_to(state, read_manifest(base))
        shutil.rmtree(a.work / "out")
    return state


def _masked(base: Path, out: Path, seed: int) -> None:
    """Whole numbers of 16 bits in the shapes of the base: any are masked values, whose sum nobody knows."""
    tensors = open_checkpoint(base).tensors.values()
    planned = [Planned(name=entry.name, dtype=MASKED[16], shape=entry.shape) for entry in tensors]
    tile = np.random.default_rng(seed).integers(0, 1 << 16, 1 << 22, np.uint16).data.cast("B")
    out.mkdir(parents=True)
    with TensorWriter(out, layout_of_shards(planned, sum(one.size for one in planned) + 1_000_000)) as writer:
        for one in planned:
            for offset in range(0, one.size, len(tile)):
                writer.write(one.name, offset, tile[: min(len(tile), one.size - offset)])


def specification(kind: str, base: Path, given: dict[str, Path], a: argparse.Namespace) -> dict[str, object]:
    """What CHILD is to average."""
    paths = {
        "base": base,
        "out": a.work / "out",
        "state": a.work / f"state-{a.dtype}",
        "state_out": a.work / "state_out",
    }
    weights = {name: float(weight) for name, weight in zip(given, WEIGHTS, strict=False)}
    updates = {name: str(path) for name, path in given.items()}
    told: dict[str, object] = {"kind": kind, "weights": weights, "updates": updates}
    return told | {name: str(path) for name, path in paths.items()}


def commands(
    kind: str, base: Path, given: dict[str, Path], files: list[Path], a: argparse.Namespace
) -> dict[str, list[str]]:
    """The contenders by name."""
    told = specification(kind, base, given, a)
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    if kind == "state":
        size += sum(file.stat().st_size for file in Path(str(told["state"])).rglob("*.safetensors"))
    io = "io_state" if kind == "state" else "io"
    found = {
        io: [sys.executable, "-c", INPUT_OUTPUT, str(told["out"]), str(size), *map(str, files)],
        "crossfed": [sys.executable, "-c", CHILD, str(ROOT), json.dumps(told)],
    }
    if a.before:
        found["before"] = [sys.executable, "-c", CHILD, str(a.before.resolve()), json.dumps(told)]
    if a.mergekit and kind == "plain":
        recipe = a.work / "mergekit.yaml"
        weights = [float(weight) for weight in WEIGHTS]
        models = [
            {"model": str(path), "parameters": {"weight": weight}}
            for path, weight in zip(given.values(), weights, strict=False)
        ]
        recipe.write_text(json.dumps({"merge_method": "linear", "dtype": a.dtype, "models": models}))
        words = [str(recipe), str(told["out"]), "--no-copy-tokenizer", "--lazy-unpickle"]
        found["mergekit"] = [a.mergekit, "-m", "mergekit.scripts.run_yaml", *words]
    return found


def cell(kind: str, base: Path, given: dict[str, Path], a: argparse.Namespace) -> dict[str, object]:
    """All contenders on these updates, turn about."""
    folders = [base, *given.values(), *([_state(kind, base, given, a)] if kind == "state" else [])]
    files = [file for folder in folders for file in sorted(folder.rglob("*.safetensors"))]
    contenders, megabytes = commands(kind, base, given, files, a), sum(file.stat().st_size for file in files) / 1e6
    runs: dict[str, list[dict[str, object]]] = {name: [] for name in contenders}
    for _ in range(a.turns):
        for name, command in contenders.items():
            for left in ("out", "state_out"):
                shutil.rmtree(a.work / left, ignore_errors=True)
            if a.cold:
                drop(files)
            run = measured(command, {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
            output = str(run.pop("output", ""))
            if "failed" not in run and name != "mergekit":
                run |= json.loads(output.splitlines()[-1])
            if a.cold and float(str(run.get("disk_read_mb", 0))) < READ_OF_COLD * megabytes:
                run.setdefault("failed", "what was dropped from the page cache was not read from a disk")
            runs[name].append(run)
    for left in ("out", "state_out"):
        shutil.rmtree(a.work / left, ignore_errors=True)
    return {"load": round(os.getloadavg()[0], 1), "runs": runs, "ratios": ratios(runs)}


def drop(files: list[Path]) -> None:
    """Leave nothing of the files in the page cache, and nothing of others that waits to be written."""
    os.sync()
    for file in files:
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ratios(runs: dict[str, list[dict[str, object]]]) -> dict[str, object]:
    """Of CPU seconds, of wall seconds, and of those until all is durable, turn by turn."""

    def ratio(above: str, below: str, key: str) -> float | None:
        if any("failed" in run for run in (*runs[above], *runs[below])):
            return None
        values = [[_seconds(run, key) for run in runs[name]] for name in (above, below)]
        each = [x / y for x, y in zip(*values, strict=True)]
        middle = median(each)
        return round(middle, 2) if all(abs(one / middle - 1) <= SPREAD for one in each) else None

    io = "io_state" if "io_state" in runs else "io"
    found: dict[str, object] = {}
    for name in ("crossfed", "before"):
        if name in runs:
            found |= {f"{name}_over_{io}_{key}": ratio(name, io, key) for key in ("cpu", "wall", "durable")}
    for above, below in (("crossfed", "before"), ("mergekit", "crossfed")):
        if above in runs and below in runs:
            for key in ("cpu_seconds", "seconds"):
                found[f"{above}_over_{below}_{key}"] = ratio(above, below, key)
    return found


def _seconds(run: dict[str, object], key: str) -> float:
    value = run[key]
    return float(value[-1] if isinstance(value, list) else str(value))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, required=True, help="scratch directory, best in memory unless --cold")
    p.add_argument("--kinds", nargs="+", choices=KINDS, default=["plain", "norms"])
    p.add_argument("--updates", type=int, nargs="+", default=[2, 4, 16], help="at most 16 (default 2 4 16)")
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of model and full updates (default bfloat16)")
    p.add_argument("--layers", type=int, default=1, help="1 is 81 MB of bfloat16 (default)")
    p.add_argument("--encoding", default="delta-int8", help="of messages (default delta-int8)")
    p.add_argument("--cold", action="store_true", help="read from the disk that --work is on, not from the page cache")
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--before", type=Path, help="root of another checkout")
    p.add_argument("--mergekit", help="Python interpreter that has mergekit; absent: not compared")
    p.add_argument("--keep", action="store_true", help="leave the checkpoints for another run")
    a = p.parse_args()
    averaging.VOCABULARY = VOCABULARY
    base, *updates = make(a.work / f"{a.layers}x{a.dtype}", a.layers, max(a.updates), a.dtype)
    print(
        json.dumps(
            {"dtype": a.dtype, "model_mb": round(sum(f.stat().st_size for f in base.glob("*.safetensors")) / 1e6)}
        )
    )
    for kind in a.kinds:
        given = prepared(kind, base, updates, a)
        for count in a.updates:
            some = dict(list(given.items())[:count])
            print(json.dumps({"kind": kind, "updates": count} | cell(kind, base, some, a)), flush=True)
    if not a.keep:
        shutil.rmtree(a.work)


if __name__ == "__main__":
    main()
