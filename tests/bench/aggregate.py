"""Time, memory and exactness of the aggregation step beside other tools, on one machine in one run.

    python tests/bench/aggregate.py --work DIR [--mergekit PYTHON] [--updates 4] [--dtype bfloat16] [--layers 16]
        [--repeat 3] [--norms]
    python tests/bench/aggregate.py --work DIR --growth

Makes a Llama checkpoint (1.1 GB bfloat16 in four shards at the default size) and updates to it, reads everything once
so that all contenders find it in the page cache, runs each contender as a process of its own, turn about, and prints
JSON: seconds (best of --repeat, and all) and peak resident memory of the process. `io` reads and writes the same bytes
with two threads and no arithmetic; `crossfed_nesterov` takes the outer step of the default rule too, `crossfed_state`
with the state of the round before, and writes the next. With --norms
updates state the norms of their steps, as those of facilities do; `crossfed_measured` is the same without. --mergekit
names a Python interpreter that has mergekit. --growth instead prints the peak memory of averaging 2 and 8 updates of
1.1 GB and 2 of 4.0 GB (hard links to the base: only their size matters; needs 10 GB). Masked updates: `masking.py`;
updates that travel as differences: `delta.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
WEIGHTS = (1200, 345, 2210, 777, 1500, 640, 90, 3000, 410, 1800, 260, 990, 2750, 130, 560, 1010)
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
HIDDEN, INTERMEDIATE, VOCABULARY = 1536, 4096, 32000

PLAIN = """
import json, sys, pathlib, shutil, torch
from safetensors.torch import load_file, save_file
base, out, *rest = sys.argv[1:]
updates, weights = rest[: len(rest) // 2], [float(w) for w in rest[len(rest) // 2 :]]
def load(update):
    return {k: v for f in sorted(pathlib.Path(update).glob("*.safetensors")) for k, v in load_file(f).items()}
models = [load(update) for update in updates]
def average(k):
    return sum(m[k].float() * (w / sum(weights)) for m, w in zip(models, weights)).to(models[0][k].dtype)
mean = {k: average(k) for k in models[0]}
pathlib.Path(out).mkdir()
for file in sorted(pathlib.Path(base).glob("*.safetensors")):
    places = json.load(open(base + "/model.safetensors.index.json"))["weight_map"]
    names = [k for k, f in places.items() if f == file.name]
    save_file({k: mean[k] for k in names}, out + "/" + file.name, metadata={"format": "pt"})
shutil.copy(base + "/model.safetensors.index.json", out)
"""
INPUT_OUTPUT = """
import os, sys, threading
out, *sources = sys.argv[1:]
os.mkdir(out)
files = sorted(f for f in os.listdir(sources[0]) if f.endswith(".safetensors"))
def work(part):
    buffer = memoryview(bytearray(8 << 20))
    for file in files[part::2]:
        inputs = [os.open(s + "/" + file, os.O_RDONLY) for s in sources]
        output = os.open(out + "/" + file, os.O_WRONLY | os.O_CREAT)
        size = os.fstat(inputs[0]).st_size
        for offset in range(0, size, 8 << 20):
            for source in inputs:
                count = os.preadv(source, [buffer], offset)
            os.pwrite(output, buffer[:count], offset)
import time; t = time.perf_counter()
threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
[t.start() for t in threads]; [t.join() for t in threads]
print(time.perf_counter() - t)
"""
LAUNCH = """
import json, os, sys, time
started = time.perf_counter()
child = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(child, 0)
print("\\n" + json.dumps({"seconds": round(time.perf_counter() - started, 2),
    "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
    "peak_mb": round(usage.ru_maxrss / 1024, 1), "disk_read_mb": round(usage.ru_inblock * 512 / 1e6)}), file=sys.stderr)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def make(directory: Path, layers: int, updates: int, dtype: str = "bfloat16") -> list[Path]:
    """The base and the updates; made of repeated random tiles, since only their bytes matter."""
    from transformers import LlamaConfig

    from facility.exchange.checkpoints.floats import STORAGE, narrow
    from facility.exchange.checkpoints.writer import Planned, TensorWriter, layout_of_shards

    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in "qkvo":
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (HIDDEN, HIDDEN)
        for name, shape in (
            ("gate", (INTERMEDIATE, HIDDEN)),
            ("up", (INTERMEDIATE, HIDDEN)),
            ("down", (HIDDEN, INTERMEDIATE)),
        ):
            shapes[f"{prefix}mlp.{name}_proj.weight"] = shape
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (HIDDEN,)
    planned = [Planned(name=name, dtype=DTYPES[dtype], shape=shape) for name, shape in shapes.items()]
    total = sum(tensor.size for tensor in planned)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        dtype=dtype,
        architectures=["LlamaForCausalLM"],
    )
    size = 1 << 22
    tile = np.random.default_rng(0).standard_normal(size, np.float32) * np.float32(0.02)
    paths = []
    for number in range(updates + 1):
        path = directory / ("base" if number == 0 else f"update{number}")
        paths.append(path)
        if path.exists():
            continue
        path.mkdir(parents=True)
        values = (
            tile
            if number == 0
            else tile + np.random.default_rng(number).standard_normal(size, np.float32) * np.float32(1e-3)
        )
        bits = np.empty(size, STORAGE[DTYPES[dtype]])
        narrow(values, DTYPES[dtype], bits, np.empty(size, np.uint32))
        stored = memoryview(bits).cast("B")
        with TensorWriter(path, layout_of_shards(planned, total // 4 + 1_000_000)) as writer:
            for tensor in planned:
                for offset in range(0, tensor.size, len(stored)):
                    writer.write(tensor.name, offset, stored[: min(len(stored), tensor.size - offset)])
        config.save_pretrained(path)
    return paths


def state_norms(base: Path, updates: list[Path]) -> None:
    """Write step_norms.json into every update."""
    from facility.exchange.checkpoints.checkpoint import open_checkpoint
    from facility.exchange.checkpoints.step_norms import StepNorms

    for update in updates:
        with StepNorms(open_checkpoint(base)) as norms:
            norms.read(open_checkpoint(update))
            norms.write(update)


def measured(command: list[str], environment: dict[str, str] | None = None) -> dict[str, object]:
    """Wall and CPU seconds, peak resident megabytes, and megabytes read from disks, of one process.

    Started by a small one: a process's peak begins with the memory of the one that started it.
    """
    command = [sys.executable, "-S", "-c", LAUNCH, *command]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    output, errors = process.communicate()
    if process.returncode:
        return {"failed": errors[-500:]}
    return json.loads(errors.splitlines()[-1]) | {"output": output}


def growth(work: Path) -> dict[str, object]:
    """Peak resident megabytes against the number of updates and the size of the model."""
    result: dict[str, object] = {}
    for layers, count in ((16, 2), (16, 8), (66, 2)):
        (base,) = make(work / f"{layers}x", layers, 0)
        command = [
            sys.executable,
            "-m",
            "coordinator.aggregate",
            "--base",
            str(base),
            "--out",
            str(work / "out"),
            "--weights",
            "equal",
            "--rule",
            "mean",
        ]
        for number in range(count):
            copy = work / f"linked{number}"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(base, copy, copy_function=os.link)
            command += ["--update", str(copy)]
        run = measured(command)
        size = sum(f.stat().st_size for f in base.glob("*.safetensors"))
        result[f"{count} updates of {size / 1e9:.2f} GB"] = run.get("peak_mb", run)
        shutil.rmtree(work / "out", ignore_errors=True)
    return result


def off_share(base: Path, updates: list[Path], out: Path) -> float:
    """Share of values that are not the correctly rounded weighted mean, computed in float64, over one shard."""
    from facility.exchange.checkpoints.checkpoint import open_checkpoint
    from facility.exchange.checkpoints.floats import STORAGE, narrow, widen

    weights = np.array(WEIGHTS[: len(updates)], np.float64)
    opened, result = [open_checkpoint(u) for u in updates], open_checkpoint(out)
    wrong = count = 0
    for name in [n for n in result.tensors if ".0." in n or ".1." in n]:

        def values(checkpoint, name=name):  # type: ignore[no-untyped-def]
            entry = checkpoint.tensors[name]
            raw = np.fromfile(entry.file, STORAGE[entry.dtype], entry.elements, offset=entry.start)
            wide = np.empty(entry.elements, np.float64)
            widen(raw, entry.dtype, wide)
            return raw, wide

        mean = sum(values(u)[1] * w for u, w in zip(opened, weights / weights.sum(), strict=True))
        dtype = result.tensors[name].dtype
        expected = np.empty(mean.size, STORAGE[dtype])
        narrow(mean, dtype, expected, np.empty(mean.size, np.uint32))
        wrong += int((values(result)[0] != expected).sum())
        count += mean.size
    return wrong / count


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, required=True, help="scratch directory; needs 1.1 GB times (updates + 3)")
    p.add_argument("--mergekit", help="Python interpreter that has mergekit; absent: not compared")
    p.add_argument("--updates", type=int, default=4, help="updates to average, at most 16 (default 4)")
    p.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of model and updates (default bfloat16)")
    p.add_argument("--layers", type=int, default=16, help="layers of the model; 16 is 1.1 GB, 66 is 4 GB (default 16)")
    p.add_argument("--repeat", type=int, default=3, help="runs of each contender (default 3)")
    p.add_argument("--only", nargs="*", help="contenders by name (default: all)")
    p.add_argument("--norms", action="store_true", help="updates state their norms, as those of facilities do")
    p.add_argument("--keep", action="store_true", help="leave the checkpoints for another run")
    p.add_argument("--growth", action="store_true", help="peak memory against updates and size, nothing else")
    a = p.parse_args()
    if a.growth:
        print(json.dumps(growth(a.work), indent=2))
        shutil.rmtree(a.work)
        return
    base, *updates = make(a.work / f"{a.layers}x{a.dtype}", a.layers, a.updates, a.dtype)
    updates = updates[: a.updates]
    for path in [f for d in (base, *updates) for f in d.glob("*.safetensors")]:
        with open(path, "rb") as file:
            while file.read(1 << 24):
                pass
    out = a.work / "out"
    weights = [str(w) for w in WEIGHTS[: a.updates]]
    settings, recipe = a.work / "settings.json", a.work / "mergekit.yaml"
    ours = [sys.executable, "-m", "coordinator.aggregate", "--base", str(base), "--out", str(out), "--json"]
    ours += [word for update in updates for word in ("--update", str(update))]
    named = {update.name: float(weight) for update, weight in zip(updates, weights, strict=True)}
    recipe.write_text(
        json.dumps(
            {
                "merge_method": "linear",
                "dtype": a.dtype,
                "models": [
                    {"model": str(u), "parameters": {"weight": w}}
                    for u, w in zip(updates, map(float, weights), strict=True)
                ],
            }
        )
    )
    contenders: dict[str, list[str]] = {
        "io": [sys.executable, "-c", INPUT_OUTPUT, str(out), str(base), *map(str, updates)],
        "crossfed": [*ours, "--settings", str(settings)],
        "crossfed_sampled": [*ours, "--settings", str(settings) + ".sampled"],
        "crossfed_nesterov": [*ours, "--settings", str(settings) + ".nesterov"],
        "plain_script": [sys.executable, "-c", PLAIN, str(base), str(out), *map(str, updates), *weights],
    }
    state, state_out = a.work / "state", a.work / "state_out"
    stateful = [*ours, "--settings", str(settings) + ".nesterov", "--state-out"]
    contenders["crossfed_state"] = [*stateful, str(state_out), "--state-in", str(state)]
    if a.norms:
        bare = [a.work / "bare" / update.name for update in updates]
        for update, copy in zip(updates, bare, strict=True):
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(update, copy, copy_function=os.link)
        without = dict(zip(map(str, updates), map(str, bare), strict=True))
        contenders["crossfed_measured"] = [without.get(word, word) for word in ours] + ["--settings", str(settings)]
        state_norms(base, updates)
    mean = {"weights": named, "rule": "mean"}
    settings.write_text(json.dumps(mean))
    Path(str(settings) + ".sampled").write_text(json.dumps(mean | {"statistics": "sample"}))
    Path(str(settings) + ".nesterov").write_text(json.dumps(mean | {"rule": "nesterov"}))
    if a.mergekit:
        contenders["mergekit"] = [
            a.mergekit,
            "-m",
            "mergekit.scripts.run_yaml",
            str(recipe),
            str(out),
            "--no-copy-tokenizer",
            "--lazy-unpickle",
        ]
    result: dict[str, object] = {
        "cores": os.cpu_count(),
        "updates": a.updates,
        "dtype": a.dtype,
        "model_bytes": sum(f.stat().st_size for f in base.glob("*.safetensors")),
    }
    chosen = {name: command for name, command in contenders.items() if not a.only or name in a.only}
    runs: dict[str, list[dict[str, object]]] = {name: [] for name in chosen}
    off: dict[str, float] = {}
    if "crossfed_state" in chosen:
        shutil.rmtree(state, ignore_errors=True)
        measured([*stateful, str(state)])
    for _ in range(a.repeat):
        for name, command in chosen.items():
            for left in (out, state_out):
                shutil.rmtree(left, ignore_errors=True)
            run = measured(command, {"HF_HUB_OFFLINE": "1"})
            output = str(run.pop("output", ""))
            if "failed" not in run:
                if name == "io":
                    run["stream_seconds"] = round(float(output), 3)
                elif name.startswith("crossfed"):
                    run |= {"phases": json.loads(output)["seconds"]}
                if name not in ("io", "crossfed_nesterov", "crossfed_state", *off) and a.updates > 1:
                    off[name] = off_share(base, updates, out)
            runs[name].append(run)
    for name, all_runs in runs.items():
        best = min(all_runs, key=lambda run: run.get("seconds", 1e9))  # type: ignore[arg-type,return-value]
        if name in off:
            best["off_the_rounded_mean"] = off[name]
        result[name] = best | {"all_seconds": [run.get("seconds") for run in all_runs]}
    print(json.dumps(result, indent=2))
    shutil.rmtree(out, ignore_errors=True)
    if not a.keep:
        shutil.rmtree(a.work)


if __name__ == "__main__":
    main()
