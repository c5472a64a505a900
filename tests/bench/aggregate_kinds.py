"""CPU seconds and memory of the aggregation by what the updates are, beside reading and writing the same bytes.

    python tests/bench/aggregate_kinds.py --work DIR [--kinds plain norms delta masked] [--updates 2 4 16]
        [--dtype bfloat16] [--layers 1] [--turns 3] [--before ROOT] [--mergekit PYTHON]

`plain`: full updates, read twice where there are three or more, since all norms must be known before the first step is
added; `norms`: full updates that state the norms of their steps, read once; `delta`: messages of delta-int8; `masked`:
16 bits, whose masks the pass takes off with one key for each update. Of messages and masked updates there are four at
most, given again under further names: their content changes no cost. `io` reads the same files and writes as much as
the model holds, with two threads and no arithmetic. Contenders run turn about, each a process of its own. For each: CPU
seconds (the machine may have other work), wall seconds and peak resident MB of the whole process, and CPU seconds of
`passes`, the last of which writes the model. Ratios are of CPU seconds: the last pass over `io`; mergekit's whole
process over ours. Each is the median of the turns, or null where a turn is more than a fifth off it. --before names the
root of another checkout, measured in the same turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from statistics import median

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
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
from coordinator.aggregate import aggregate
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
passes, run = [], kernel.run
def timed(*arguments, **named):
    begun = time.process_time()
    found = run(*arguments, **named)
    passes.append(round(time.process_time() - begun, 3))
    return found
kernel.run = timed
updates = {n: Path(p) for n, p in given["updates"].items()}
aggregate(base=Path(given["base"]), updates=updates, out=Path(given["out"]), **more)
print(json.dumps(passes))
"""
INPUT_OUTPUT = """
import json, os, sys, threading, time
out, size, *files = sys.argv[1:]
os.mkdir(out)
def work(part):
    buffer = memoryview(bytearray(8 << 20))
    left = int(size) // 2
    for file in files[part::2]:
        with open(file, "rb", buffering=0) as source:
            while source.readinto(buffer):
                pass
    with open(f"{out}/{part}", "wb", buffering=0) as output:
        while left:
            left -= output.write(buffer[: min(left, len(buffer))])
begun = time.process_time()
threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
print(json.dumps([round(time.process_time() - begun, 3)]))
"""


def prepared(kind: str, base: Path, updates: list[Path], work: Path) -> dict[str, Path]:
    """The updates of a kind, by facility."""
    folder = work / kind
    if kind != "delta":  # only messages need one, and beside it every update does
        (base / "manifest.json").unlink(missing_ok=True)
    if kind == "plain":
        return {update.name: update for update in updates}
    made: list[Path] = []
    for update in updates if kind == "norms" else updates[:DISTINCT]:
        made.append(folder / update.name)
        if made[-1].exists():
            continue
        if kind == "masked":
            _masked(base, made[-1], len(made))
        elif kind == "norms":
            shutil.copytree(update, made[-1], copy_function=os.link)
            state_norms(base, [made[-1]])
        else:
            _message(base, update, made[-1])
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


def _message(base: Path, update: Path, out: Path) -> None:
    from facility.exchange.checkpoints.delta import encode
    from facility.exchange.messages.manifest import NAME, Manifest, write_manifest

    if not (base / NAME).exists():
        write_manifest(base, Manifest(kind="model", federation="bench", round=0))
    if not (update / NAME).exists():
        write_manifest(update, Manifest(kind="update", federation="bench", round=0, facility=update.name))
    out.parent.mkdir(exist_ok=True)
    encode(full=update, reference=base, out=out, encoding="delta-int8", norms=True)


def _masked(base: Path, out: Path, seed: int) -> None:
    """Whole numbers of 16 bits in the shapes of the base: any are masked values, whose sum nobody knows."""
    from facility.exchange.checkpoints.checkpoint import open_checkpoint
    from facility.exchange.checkpoints.writer import Planned, TensorWriter, layout_of_shards
    from facility.exchange.masking.streams import DTYPES as MASKED

    tensors = open_checkpoint(base).tensors.values()
    planned = [Planned(name=entry.name, dtype=MASKED[16], shape=entry.shape) for entry in tensors]
    tile = np.random.default_rng(seed).integers(0, 1 << 16, 1 << 22, np.uint16).data.cast("B")
    out.mkdir(parents=True)
    with TensorWriter(out, layout_of_shards(planned, sum(one.size for one in planned) + 1_000_000)) as writer:
        for one in planned:
            for offset in range(0, one.size, len(tile)):
                writer.write(one.name, offset, tile[: min(len(tile), one.size - offset)])


def cell(kind: str, base: Path, given: dict[str, Path], a: argparse.Namespace) -> dict[str, object]:
    """All contenders on these updates, turn about."""
    out = a.work / "out"
    weights = {name: float(weight) for name, weight in zip(given, WEIGHTS, strict=False)}
    specification = json.dumps(
        {"kind": kind, "base": str(base), "updates": {n: str(p) for n, p in given.items()}, "out": str(out)}
        | {"weights": weights}
    )
    files = [str(file) for folder in (base, *given.values()) for file in sorted(folder.glob("*.safetensors"))]
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    contenders = {
        "io": [sys.executable, "-c", INPUT_OUTPUT, str(out), str(size), *files],
        "crossfed": [sys.executable, "-c", CHILD, str(ROOT), specification],
    }
    if a.before:
        contenders["before"] = [sys.executable, "-c", CHILD, str(a.before.resolve()), specification]
    if a.mergekit and kind == "plain":
        recipe = a.work / "mergekit.yaml"
        models = [{"model": str(p), "parameters": {"weight": weights[n]}} for n, p in given.items()]
        recipe.write_text(json.dumps({"merge_method": "linear", "dtype": a.dtype, "models": models}))
        words = [str(recipe), str(out), "--no-copy-tokenizer", "--lazy-unpickle"]
        contenders["mergekit"] = [a.mergekit, "-m", "mergekit.scripts.run_yaml", *words]
    runs: dict[str, list[dict[str, object]]] = {name: [] for name in contenders}
    for _ in range(a.turns):
        for name, command in contenders.items():
            shutil.rmtree(out, ignore_errors=True)
            run = measured(command, {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})
            output = str(run.pop("output", ""))
            if "failed" not in run and name != "mergekit":
                run["passes"] = json.loads(output.splitlines()[-1])
            runs[name].append(run)
    shutil.rmtree(out, ignore_errors=True)
    return {"runs": runs, "ratios": ratios(runs)}


def ratios(runs: dict[str, list[dict[str, object]]]) -> dict[str, object]:
    """Of CPU seconds, turn by turn."""

    def ratio(above: str, below: str, key: str) -> float | None:
        if any("failed" in run for run in (*runs[above], *runs[below])):
            return None
        values = [[_seconds(run, key) for run in runs[name]] for name in (above, below)]
        each = [x / y for x, y in zip(*values, strict=True)]
        middle = median(each)
        return round(middle, 2) if all(abs(one / middle - 1) <= SPREAD for one in each) else None

    found: dict[str, object] = {"crossfed_over_io": ratio("crossfed", "io", "passes")}
    if "before" in runs:
        found["before_over_io"] = ratio("before", "io", "passes")
        found["crossfed_over_before"] = ratio("crossfed", "before", "cpu_seconds")
    if "mergekit" in runs:
        found["mergekit_over_crossfed"] = ratio("mergekit", "crossfed", "cpu_seconds")
    return found


def _seconds(run: dict[str, object], key: str) -> float:
    value = run[key]
    return float(value[-1] if isinstance(value, list) else str(value))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, required=True, help="scratch directory, best in memory")
    p.add_argument("--kinds", nargs="+", choices=("plain", "norms", "delta", "masked"), default=["plain", "norms"])
    p.add_argument("--updates", type=int, nargs="+", default=[2, 4, 16], help="at most 16 (default 2 4 16)")
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of model and full updates (default bfloat16)")
    p.add_argument("--layers", type=int, default=1, help="1 is 81 MB of bfloat16 (default)")
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
        given = prepared(kind, base, updates, a.work)
        for count in a.updates:
            some = dict(list(given.items())[:count])
            print(json.dumps({"kind": kind, "updates": count} | cell(kind, base, some, a)), flush=True)
    if not a.keep:
        shutil.rmtree(a.work)


if __name__ == "__main__":
    main()
