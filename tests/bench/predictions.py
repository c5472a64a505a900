"""What is predicted of a round beside what is measured, over sizes, layouts, LoRA, encodings. Prints JSON.

    python tests/bench/predictions.py [--cases small,fsdp,...] [--out FILE]

Each case trains one real round by `facility.round` on this machine's CPU. Memory: of the largest rank, as the trainer
predicts it before it loads anything (`facility.training.memory`), and its peak resident set. Disk: what
`crossfed check` counts for the update, its encoded form and the optimizer state (`coordinator.preflight.disk`), and
the bytes of those files. Link: bytes of the update as it travels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from coordinator.memory.figures import model_figures
from coordinator.preflight.disk import facility_disk
from facility.exchange.messages.manifest import Manifest, read_manifest, write_manifest
from facility.exchange.messages.report import predicted_memory_of, read_report
from facility.exchange.messages.settings import read_facility_settings
from tests.bench.asked import names_of
from tests.federations import write_dataset
from tests.pico import save_pico

ROOT = Path(__file__).resolve().parents[2]
BATCH, TOKENS = 4, 128


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model and how it is trained."""

    hidden: int
    layers: int
    vocabulary: int = 8192
    batch: int = BATCH
    """Sequences of `TOKENS` tokens a step."""
    training: dict[str, Any] = field(default_factory=dict)
    private: bool = False
    """With differential privacy of every block."""


PIPELINE: dict[str, Any] = {"ranks": 2, "micro_batch_sequences": 2, "layout": {"stages": 2}}
ZERO_BUBBLE = {"stages": 2, "virtual_stages": 2, "schedule": "interleaved_zero_bubble"}
LORA: dict[str, Any] = {"lora": {"rank": 8}}
ROWS, MANY = ({"micro_batch_sequences": rows} for rows in (8, 32))
CASES = {
    "small": Case(hidden=256, layers=4),
    "medium": Case(hidden=512, layers=6),
    "large": Case(hidden=512, layers=6, vocabulary=32768),
    "bfloat16": Case(hidden=512, layers=6, training={"compute_dtype": "bfloat16"}),
    "fsdp": Case(hidden=512, layers=6, training={"ranks": 2}),
    "fsdp-small": Case(hidden=256, layers=4, training={"ranks": 2}),
    "fsdp-wide": Case(hidden=1024, layers=8, training={"ranks": 2}),
    "fsdp-lora": Case(hidden=512, layers=6, training={"ranks": 2, "lora": {"rank": 8}}),
    "ddp": Case(hidden=512, layers=6, training={"ranks": 2, "layout": {"sharding": "NO_SHARD"}}),
    "pipeline": Case(hidden=512, layers=6, batch=8, training=PIPELINE),
    "pipeline-bfloat16": Case(hidden=512, layers=6, batch=8, training=PIPELINE | {"compute_dtype": "bfloat16"}),
    "zero-bubble": Case(hidden=512, layers=6, batch=8, training=PIPELINE | {"layout": ZERO_BUBBLE}),
    "checkpointing": Case(hidden=512, layers=6, training={"layout": {"activation_checkpointing": "full"}}),
    "lora": Case(hidden=512, layers=6, training={"lora": {"rank": 8}}),
    "lora-few-tokens": Case(hidden=512, layers=6, batch=1, training={"lora": {"rank": 8}}),
    "lora-many-tokens": Case(hidden=512, layers=6, batch=16, training={"lora": {"rank": 8}}),
    "lora-large": Case(hidden=1024, layers=8, training={"lora": {"rank": 8}}),
    "lora-two-layers": Case(hidden=512, layers=6, training={"lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}}),
    "qlora": Case(hidden=512, layers=6, training={"lora": {"rank": 8, "quantize_base": "nf4"}}),
    "qlora-large": Case(hidden=1024, layers=8, training={"lora": {"rank": 8, "quantize_base": "nf4"}}),
    "many-tokens": Case(hidden=512, layers=6, batch=16),
    "wide": Case(hidden=1024, layers=8),
    "adafactor": Case(hidden=512, layers=6, training={"optimizer": "adafactor"}),
    "muon": Case(hidden=512, layers=6, training={"optimizer": "muon"}),
    "private-one-row": Case(hidden=512, layers=6, batch=8, private=True, training={"micro_batch_sequences": 1}),
    "private-small": Case(hidden=256, layers=4, batch=32, private=True, training=ROWS),
    "private": Case(hidden=512, layers=6, batch=16, private=True, training={"micro_batch_sequences": 4}),
    "private-auto": Case(hidden=256, layers=4, batch=24, private=True),
    "private-large-vocabulary": Case(hidden=256, layers=2, vocabulary=32768, batch=16, private=True, training=ROWS),
    "private-bfloat16": Case(
        hidden=256, layers=4, batch=32, private=True, training=ROWS | {"compute_dtype": "bfloat16"}
    ),
    "private-replicas": Case(
        hidden=256, layers=4, batch=64, private=True, training=ROWS | {"ranks": 2, "layout": {"sharding": "NO_SHARD"}}
    ),
    "private-lora": Case(hidden=512, layers=6, batch=32, private=True, training=ROWS | LORA),
    "private-lora-many-rows": Case(hidden=256, layers=4, batch=64, private=True, training=MANY | LORA),
    "private-lora-bfloat16": Case(
        hidden=256, layers=4, batch=64, private=True, training=MANY | LORA | {"compute_dtype": "bfloat16"}
    ),
    "int8": Case(hidden=512, layers=6, training={"encoding": "delta-int8", "export_dtype": "float32"}),
}


def ratio(measured: float, predicted: float) -> float | None:
    return round(measured / predicted, 3) if predicted else None


def size(folder: Path) -> int:
    """Bytes of the tensors below a directory."""
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Train one round; predicted and measured bytes."""
    shape = {"hidden_size": case.hidden, "intermediate_size": 3 * case.hidden, "num_hidden_layers": case.layers}
    model = save_pico(
        folder / "model", dtype="bfloat16", vocab_size=case.vocabulary, max_position_embeddings=TOKENS, **shape
    )
    write_manifest(model, Manifest(kind="model", federation="bench", round=0))
    blocks = max(64, 2 * case.batch)
    write_dataset(folder / "dataset", blocks=blocks, block_tokens=TOKENS, vocabulary_size=case.vocabulary)
    training = {
        "steps": 3,
        "batch_sequences": case.batch,
        "learning_rate": 1e-4,
        "threads": 1,
        "device": "cpu",
        "ranks": 1,
    }
    if "lora" in case.training:
        training["lora"] = case.training["lora"] | {"base": str(model)}
    settings = {"federation": "bench", "facility": "here", "rounds": 1, "seed": 0, "training": case.training | training}
    settings["training"] |= {name: value for name, value in case.training.items() if name != "lora"}
    if case.private:
        settings["differential"] = {"epsilon": 8.0, "delta": 1e-4, "unit": "block"}
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "facility.round", "--model", str(model), "--dataset", str(folder / "dataset")]
    command += ["--settings", str(folder / "settings.json"), "--round", "0", "--out", "update", "--state", "state"]
    (folder / "job").mkdir()
    began = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder / "job", env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{case} ended with {done.returncode}: {done.stderr[-3000:]}")
    update, state, report = folder / "job/update", folder / "job/state", read_report(folder / "job/update")
    training_settings = read_facility_settings(folder / "settings.json").training
    figures = model_figures(model)
    disk = facility_disk(figures, training_settings).parts
    encoded = bool(disk["its encoded form"])
    link = disk["its encoded form"] if encoded else disk["update"]
    moments = size(state / "round-0")
    predicted = predicted_memory_of(report)
    return {
        "parameters": figures.parameters,
        "seconds": round(time.perf_counter() - began, 1),
        "memory": [predicted, report.peak_memory_bytes, ratio(report.peak_memory_bytes, predicted)],
        "update": [link, size(update), ratio(size(update), link)],
        "optimizer_state": [disk["optimizer state"], moments, ratio(moments, disk["optimizer state"])],
        "encoding": read_manifest(update).encoding,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", type=names_of(CASES), default=",".join(CASES), help="names of cases, by commas (default: all)"
    )
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    found = {}
    for name in arguments.cases:
        with tempfile.TemporaryDirectory(prefix="crossfed-predictions-") as folder:
            found[name] = run(CASES[name], Path(folder))
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    text = json.dumps({"each": "predicted, measured, measured / predicted", "cases": found}, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
