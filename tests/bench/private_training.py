"""What differential privacy costs a step: seconds and memory beside plain training, of adapters and of a whole model.

    python -m tests.bench.private_training --work DIR [--steps 12] [--rows 1 8 16] [--kinds adapters whole]

A llama of 6 million parameters on made-up blocks of 128 tokens, 16 a step, one process; prints a JSON object an arm.
The first two steps are left out. Noise does not depend on how long a step takes, so the budget is any.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from facility.exchange.messages.report import read_report
from tests.bench.asked import at_least
from tests.pico import save_pico
from tests.training.federation import write_dataset, write_settings

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
}
BATCH, TOKENS = 16, 128
KINDS: dict[str, dict[str, Any]] = {"adapters": {"lora": {"rank": 8}}, "whole": {}}


def run(work: Path, name: str, *, private: bool, steps: int, **training: Any) -> dict[str, Any]:
    """One round in a process of its own."""
    place = work / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    settings = write_settings(
        place / "settings.json", rounds=1, steps=steps, batch_sequences=BATCH, evaluation_sequences=8, **training
    )
    if private:
        raw = json.loads(settings.read_text())
        raw["differential"] = {"epsilon": 8.0, "delta": 1e-4, "unit": "block"}
        settings.write_text(json.dumps(raw))
    words = ["--model", work / "model", "--dataset", work / "data", "--settings", settings, "--round", "0"]
    words += ["--out", place / "out", "--state", place / "state"]
    command = [sys.executable, "-m", "facility.train", *map(str, words)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    report = read_report(place / "out")
    return {
        "arm": name,
        "seconds_a_step": BATCH * TOKENS / report.details["tokens_per_second_steady"],
        "peak_mb": round(report.peak_memory_bytes / 1e6),
        "trained_parameters": report.details["trained_parameters"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=at_least(3), default=12)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--rows", type=at_least(1), nargs="+", default=[1, 8, 16], help="sequences of a micro-batch")
    arguments = parser.parse_args()
    work = arguments.work
    shutil.rmtree(work / "data", ignore_errors=True)
    save_pico(work / "model", **MODEL)
    write_dataset(work / "data", train=400, validation=8, block_tokens=TOKENS, vocabulary=4096)
    for kind in arguments.kinds:
        for rows in arguments.rows:
            for private in (False, True):
                name = f"{kind}-{rows}-{'private' if private else 'plain'}"
                found = run(
                    work, name, private=private, steps=arguments.steps, micro_batch_sequences=rows, **KINDS[kind]
                )
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
