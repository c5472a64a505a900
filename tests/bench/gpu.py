"""Everything worth knowing about the trainer on a GPU, in one command. Prints JSON.

    python tests/bench/gpu.py --minutes 9 [--out FILE]       on any machine with a CUDA device
    python tests/bench/gpu.py --tiny                         the same steps on a CPU, with sizes of a rehearsal

1. Laws: a pico model after four steps, by every setting that a GPU adds (bf16, compile, recomputation, offload, the
   chunked loss, adapters, a base in 4 bits, Muon), beside one plain float32 process on the CPU: largest difference of a
   weight.
2. Speed: a 1 B Llama at sequence 2,048 in bf16 with the best settings found, beside Hugging Face's Trainer and a plain
   FSDP2 loop (`gpu_plain.py`) on the same model and data, turn about: tokens a second, MFU, peak memory beside what
   `crossfed check` predicts. A ratio is printed only where the turns' spread allows one.
3. A federation of two facilities on this device, 150 M parameters on two real texts: perplexity after every round, and
   joules of every job as its report says, beside the integral of the power that `nvidia-smi` reports. --keep DIR keeps
   the federation's report there, as JSON, Markdown and HTML.

A part that no longer fits in --minutes is left out and says so; a part that fails says why, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from coordinator.memory.figures import model_figures
from coordinator.memory.need import needed_bytes
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.messages.report import read_report
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.validation import parse_dataclass
from tests.bench.gpu_energy import PowerLog, energies
from tests.bench.train_speed import spawn
from tests.training.federation import write_dataset


@dataclass(frozen=True, kw_only=True)
class Law:
    """One way to train on a GPU, and how far it may end from the plain way on the CPU."""

    name: str
    changes: dict[str, Any]
    """Settings beside those of `reference`."""
    bound: float
    """Of every weight after four steps at 1e-3. AdamW moves a weight by the learning rate a step, whichever the size of
    its gradient: bf16 may change a step's sign where that is noise."""
    reference: str = "plain"
    """In `REFERENCES`."""


BF16, COMPILED = {"compute_dtype": "bfloat16"}, {"layout": {"compile": True}}
REFERENCES: dict[str, dict[str, Any]] = {
    "plain": {},
    "adapters": {"lora": {"rank": 4}},
    "adapters on 4 bits": {"lora": {"rank": 4, "quantize_base": "nf4"}},
    "muon": {"optimizer": "muon"},
}
"""What is trained: each in float32 by one process on the CPU."""
LAWS = (
    Law(name="float32", changes={}, bound=2e-5),
    Law(name="float32, compiled", changes=COMPILED, bound=2e-5),
    Law(name="float32, recomputation", changes={"layout": {"activation_checkpointing": "full"}}, bound=2e-5),
    Law(
        name="float32, selective recomputation",
        changes={"layout": {"activation_checkpointing": "selective"}},
        bound=2e-5,
    ),
    Law(name="float32, chunked loss", changes={"chunked_loss": "always"}, bound=2e-5),
    Law(name="float32, two micro-batches", changes={"micro_batch_sequences": 2}, bound=2e-5),
    Law(name="float32, adapters", changes={}, bound=2e-5, reference="adapters"),
    Law(name="float32, adapters on 4 bits", changes={}, bound=2e-5, reference="adapters on 4 bits"),
    Law(name="float32, Muon", changes={}, bound=2e-5, reference="muon"),
    Law(name="bfloat16", changes=BF16, bound=4e-3),
    Law(name="bfloat16, compiled", changes=BF16 | COMPILED, bound=4e-3),
    Law(name="bfloat16, offload", changes=BF16 | {"layout": {"offload": True}}, bound=4e-3),
    Law(name="bfloat16, adapters", changes=BF16, bound=4e-3, reference="adapters"),
    Law(name="bfloat16, adapters, compiled", changes=BF16 | COMPILED, bound=4e-3, reference="adapters"),
    Law(name="bfloat16, adapters on 4 bits", changes=BF16, bound=4e-3, reference="adapters on 4 bits"),
    Law(name="bfloat16, Muon", changes=BF16, bound=4e-3, reference="muon"),
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocabulary: int
    tokens: int
    micro: tuple[int, ...]
    """Sequences a forward pass to try, largest first."""
    batch: int
    steps: int
    turns: int


LARGE = Sizes(
    hidden=2048,
    layers=18,
    heads=16,
    intermediate=5632,
    vocabulary=32_000,
    tokens=2048,
    micro=(16, 8, 4),
    batch=16,
    steps=6,
    turns=2,
)
PICO = Sizes(
    hidden=64, layers=2, heads=4, intermediate=128, vocabulary=128, tokens=16, micro=(2,), batch=4, steps=4, turns=1
)
"""Of the laws; layers wide enough for blocks of 4 bits."""
TINY = Sizes(
    hidden=32, layers=1, heads=4, intermediate=64, vocabulary=128, tokens=16, micro=(2,), batch=4, steps=4, turns=1
)


class Deadline:
    """Minutes that are left."""

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def left(self) -> float:
        return self.end - time.monotonic()


@contextlib.contextmanager
def told(result: dict[str, Any], part: str, deadline: Deadline, seconds: float) -> Iterator[dict[str, Any]]:
    """A part's own figures; why it failed, or that there was no time for it."""
    entry: dict[str, Any] = {}
    result[part] = entry
    if deadline.left() < seconds:
        entry["left_out"] = f"{deadline.left():.0f} s were left, it may take {seconds:.0f}"
        yield {}
        return
    began = time.monotonic()
    try:
        yield entry
    except Exception as error:
        entry["failed"] = str(error)[-1500:]
    entry["seconds"] = round(time.monotonic() - began, 1)


def train(folder: Path, training: dict[str, Any]) -> Path:
    """One round of `facility.train` in a process of its own; the update."""
    settings = {"federation": "bench", "facility": "here", "rounds": 1, "seed": 0, "training": training}
    (folder / "settings.json").write_text(json.dumps(settings))
    out = folder / "out"
    for left in (out, folder / "state"):
        shutil.rmtree(left, ignore_errors=True)
    command = [sys.executable, "-m", "facility.train", "--model", str(folder / "model")]
    command += ["--dataset", str(folder / "data"), "--settings", str(folder / "settings.json"), "--round", "0"]
    spawn([*command, "--out", str(out), "--state", str(folder / "state")], 1)
    return out


def llama(folder: Path, sizes: Sizes, device: str) -> int:
    """Random weights of a Llama below `folder`/model, and data; its parameters."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    configuration = LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.tokens,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(configuration, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    write_dataset(
        folder / "data", train=sizes.batch * sizes.steps, block_tokens=sizes.tokens, vocabulary=sizes.vocabulary
    )
    return sum(p.numel() for p in model.parameters())


def laws(folder: Path, device: str, entry: dict[str, Any]) -> None:
    """Every law, several side by side where there are cores."""
    llama(folder, PICO, "cpu")
    common = {"steps": 4, "batch_sequences": 4, "learning_rate": 1e-3, "export_dtype": "float32", "threads": 1}

    def trained(name: str, training: dict[str, Any]) -> dict[str, torch.Tensor]:
        place = folder / re.sub("[^a-z0-9]+", "-", name.lower())
        place.mkdir()
        for shared in ("model", "data"):
            (place / shared).symlink_to(folder / shared)
        update = open_checkpoint(train(place, common | training))
        return {tensor: update.read(tensor) for tensor in update.tensors}

    def judged(law: Law) -> dict[str, Any]:
        try:
            found = trained(law.name, REFERENCES[law.reference] | law.changes | {"device": device})
            wanted = references[law.reference].result()
        except RuntimeError as error:
            return {"failed": str(error)[-400:]}
        assert found.keys() == wanted.keys()
        off = max(float((found[one] - tensor).abs().max()) for one, tensor in wanted.items())
        return {"largest_difference": off, "bound": law.bound, "holds": off <= law.bound}

    with ThreadPoolExecutor(max(1, min(6, (os.cpu_count() or 1) // 2))) as pool:
        references = {
            name: pool.submit(trained, f"cpu {name}", training | {"device": "cpu"})
            for name, training in REFERENCES.items()
        }
        for law, verdict in zip(LAWS, pool.map(judged, LAWS), strict=True):
            entry[law.name] = verdict


def candidates(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Settings in the order in which they are worth trying."""
    for micro in sizes.micro:
        for checkpointing in ("none", "selective"):
            yield {
                "micro_batch_sequences": micro,
                "layout": {"compile": True, "activation_checkpointing": checkpointing},
            }


def ours(folder: Path, sizes: Sizes, device: str, changes: dict[str, Any]) -> dict[str, Any]:
    common = {
        "steps": sizes.steps,
        "batch_sequences": sizes.batch,
        "learning_rate": 1e-4,
        "compute_dtype": "bfloat16",
        "device": device,
        "evaluation_sequences": 1,
        "keep_optimizer": False,
    }
    report = read_report(train(folder, common | changes))
    return {
        "tokens_per_second": float(report.details["tokens_per_second_steady"]),
        "operations_per_token": report.details["flops_per_second"] / report.tokens * report.seconds.train,
        "peak_memory_bytes": report.peak_memory_bytes,
    }


def peer(command: list[str]) -> Callable[[], dict[str, Any]]:
    return lambda: json.loads(spawn([sys.executable, *command], 1)[0].strip().splitlines()[-1])


def ratio(mine: list[float], theirs: list[float]) -> float | str:
    """Median over median, unless the slowest of the faster side is not faster than the fastest of the slower one."""
    fast, slow = (mine, theirs) if statistics.median(mine) >= statistics.median(theirs) else (theirs, mine)
    if min(fast) <= max(slow):
        return "none: the turns overlap"
    return round(statistics.median(mine) / statistics.median(theirs), 3)


def speed(folder: Path, sizes: Sizes, device: str, deadline: Deadline, entry: dict[str, Any]) -> None:
    entry["parameters"] = llama(folder, sizes, device)
    best: dict[str, Any] = {}
    tried = entry["tried"] = []
    for changes in candidates(sizes):
        if best and deadline.left() < 240:
            break
        try:
            figures = ours(folder, sizes, device, changes)
        except RuntimeError as error:
            tried.append(changes | {"failed": str(error).strip().splitlines()[-1][-200:]})
            continue
        tried.append(changes | figures)
        if not best or figures["tokens_per_second"] > best["figures"]["tokens_per_second"]:
            best = {"settings": changes, "figures": figures}
        elif best["settings"]["micro_batch_sequences"] != changes["micro_batch_sequences"]:
            break  # smaller passes are slower from here on
    if not best:
        raise RuntimeError("no settings ran")
    micro = str(best["settings"]["micro_batch_sequences"])
    here = Path(__file__).parent
    common = ["--folder", str(folder), "--steps", str(sizes.steps), "--batch", str(sizes.batch), "--micro", micro]
    common += ["--dtype", "bfloat16", "--device", device]
    contenders: dict[str, Callable[[], dict[str, Any]]] = {
        "crossfed": lambda: ours(folder, sizes, device, best["settings"]),
        "trainer": peer([str(here / "train_speed.py"), "--trainer", "single", *common, "--compile"]),
        "fsdp2": peer([str(here / "gpu_plain.py"), *common, "--compile"]),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    failures: dict[str, str] = {}
    for _ in range(sizes.turns):
        for name, run in contenders.items():
            if deadline.left() < 45 and all(rates.values()):
                continue
            try:
                rates[name].append(run()["tokens_per_second"])
            except RuntimeError as error:
                failures[name] = str(error).strip().splitlines()[-1][-300:]
    model, operations = model_figures(folder / "model"), best["figures"]["operations_per_token"]
    asked = {"batch_sequences": sizes.batch, "compute_dtype": "bfloat16"} | best["settings"]
    settings = parse_dataclass(TrainingSettings, asked)
    peak = peak_of(device)
    entry |= {
        "settings": best["settings"],
        "tokens_per_second": rates,
        "failures": failures,
        "mfu": {n: round(statistics.median(r) * operations / peak, 4) for n, r in rates.items() if r} if peak else None,
        "ratio_over": {n: ratio(rates["crossfed"], r) for n, r in rates.items() if r and n != "crossfed"},
        "peak_memory_bytes": {
            "measured": best["figures"]["peak_memory_bytes"],
            "predicted_by_check": needed_bytes(model, settings, sizes.tokens, 1),
        },
    }


def peak_of(device: str) -> float | None:
    from facility.training.account import peak_flops

    return peak_flops(torch.cuda.get_device_name(0)) if device == "cuda" else None


def federation(
    folder: Path, tiny: bool, device: str, deadline: Deadline, entry: dict[str, Any], keep: Path | None = None
) -> None:
    """Two facilities on two real texts (Python's own sources and manual), as `crossfed run` does it."""
    import yaml

    from coordinator.archive.journal import Journal
    from coordinator.archive.rounds import Archive
    from coordinator.archive.summary import summary
    from coordinator.config.federation import read_federation
    from coordinator.demo import Sizes as Material
    from coordinator.demo import make_demo

    material = (
        Material()
        if tiny
        else Material(
            characters=12_000_000, vocabulary=8192, block_tokens=512, hidden=768, layers=18, heads=12, intermediate=2304
        )
    )
    entry["parameters"] = make_demo(folder, sizes=material)[0]["parameters"]
    described = {
        "name": "gpu",
        "model": "../model",
        "rounds": 1 if tiny else 4,
        "archive": "../archive",
        "workdir": "../work",
        "training": {
            "steps": 2 if tiny else 40,
            "batch_sequences": 4 if tiny else 32,
            "learning_rate": 6e-4,
            "warmup_steps": 2 if tiny else 20,
            "compute_dtype": "float32" if tiny else "bfloat16",
            "device": device,
            "evaluation_sequences": 8 if tiny else 64,
        },
        "facilities": [{"name": name, "dataset": f"../datasets/{name}"} for name in ("stdlib", "manual")],
    }
    path = folder / "workflow" / "federation.yml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    seconds = max(60.0, deadline.left() - 10)
    command = [sys.executable, "-m", "coordinator.cli", "run", "--quiet", "-f", str(path)]
    with PowerLog() as power:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
            entry["ended"] = "done" if done.returncode == 0 else (done.stdout + done.stderr)[-800:]
        except subprocess.TimeoutExpired:
            entry["ended"] = "stopped: the minutes are over"
    archive = Archive(read_federation(path).archive_path)
    data = summary(archive)
    entry["perplexity"] = [data["initial_perplexity"], *(one["global_perplexity"] for one in data["rounds"])]
    entry["facilities"] = [
        {"round": one["round"], **{row["facility"]: row["tokens_per_second"] for row in one["facilities"]}}
        for one in data["rounds"]
    ]
    entry["usage"] = [row.get("usage") for one in data["rounds"] for row in one["facilities"]]
    entry["energy"] = energies(data["rounds"], Journal(archive.path).read(), power.samples)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for form in ("json", "md", "html"):
            command = [sys.executable, "-m", "coordinator.cli", "report", "-f", str(path), "--format", form]
            subprocess.run([*command, "--out", str(keep / f"report.{form}")], check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="no part begins that would end later")
    parser.add_argument("--tiny", action="store_true", help="rehearse every part with tiny sizes, on a CPU if need be")
    parser.add_argument("--parts", default="laws,speed,federation", help="by commas")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    parser.add_argument("--keep", type=Path, help="directory for the federation's report")
    a = parser.parse_args()
    if not torch.cuda.is_available() and not a.tiny:
        print("error: torch sees no CUDA device here; --tiny rehearses on the CPU", file=sys.stderr)
        return 2
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    device, deadline = "cuda" if torch.cuda.is_available() else "cpu", Deadline(a.minutes)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0) if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "tiny": a.tiny,
    }
    parts: dict[str, tuple[float, Callable[[Path, dict[str, Any]], None]]] = {
        "laws": (60, lambda folder, entry: laws(folder, device, entry)),
        "speed": (
            150,
            lambda folder, entry: speed(folder, TINY if a.tiny else LARGE, device, deadline, entry),
        ),
        "federation": (60, lambda folder, entry: federation(folder, a.tiny, device, deadline, entry, a.keep)),
    }
    for name in a.parts.split(","):
        seconds, part = parts[name]
        with (
            tempfile.TemporaryDirectory(prefix="crossfed-gpu-") as folder,
            told(result, name, deadline, 0 if a.tiny else seconds) as entry,
        ):
            if "left_out" not in result[name]:
                part(Path(folder), entry)
        if a.out:  # after each part, so that nothing is lost with the machine
            a.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
