"""Peak memory and speed of a round whose vocabulary is large, with all logits at once and with the loss in chunks.

    python tests/bench/train_head.py [--vocabulary 128256] [--tokens 512] [--repeats 1]

A small Llama with a vocabulary of the size of Llama 3's, `facility.train` in a process of its own a turn, the two ways
taking turns. `above` is the peak resident memory above what the imported libraries and the state of training (weights,
gradients, moments: 16 bytes a parameter) take. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.asked import at_least

ROOT = Path(__file__).resolve().parents[2]


def imported_bytes() -> int:
    """Resident memory of a process that has imported what the trainer imports."""
    code = (
        "import resource, facility.train, transformers.models.llama.modeling_llama, peft; "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return int(output) * 1024


def turn(folder: Path, way: str, a: argparse.Namespace) -> dict[str, float]:
    """One round; its peak memory in bytes and its tokens a second."""
    from facility.exchange.messages.report import read_report

    settings = {
        "federation": "bench",
        "facility": "here",
        "rounds": 1,
        "seed": 0,
        "training": {
            "steps": a.steps,
            "batch_sequences": a.sequences,
            "device": "cpu",
            "threads": a.threads,
            "evaluation_sequences": 1,
            "keep_optimizer": False,
            "chunked_loss": way,
        },
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "facility.train",
        "--model",
        str(folder / "model"),
        "--dataset",
        str(folder / "data"),
        "--settings",
        str(folder / "settings.json"),
        "--round",
        "0",
        "--out",
        str(out),
        "--state",
        str(folder / "state"),
    ]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
    report = read_report(out)
    return {
        "peak_memory_bytes": report.peak_memory_bytes,
        "training_loss": report.training_loss,
        "tokens_per_second": report.details["tokens_per_second_steady"],
    }


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--vocabulary", type=int, default=128_256, help="tokens of the vocabulary")
    p.add_argument("--tokens", type=int, default=512, help="tokens a sequence")
    p.add_argument("--sequences", type=int, default=2, help="sequences of a step, one forward pass")
    p.add_argument("--hidden", type=int, default=64, help="width of the Llama")
    p.add_argument("--layers", type=int, default=2, help="blocks of the Llama")
    p.add_argument(
        "--steps", type=at_least(3), default=5, help="optimizer steps of a round; the first two are not counted"
    )
    p.add_argument("--repeats", type=at_least(1), default=1, help="turns of each way")
    p.add_argument("--threads", type=int, default=2, help="CPU threads")
    a = p.parse_args()
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tests.training.federation import write_dataset

    folder = Path(tempfile.mkdtemp(prefix="train-head-"))
    try:
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(
                hidden_size=a.hidden,
                intermediate_size=4 * a.hidden,
                num_hidden_layers=a.layers,
                num_attention_heads=4,
                vocab_size=a.vocabulary,
                max_position_embeddings=a.tokens,
                tie_word_embeddings=True,
            )
        )
        model.save_pretrained(folder / "model")
        parameters = sum(p.numel() for p in model.parameters())
        del model
        write_dataset(folder / "data", train=a.sequences * a.steps, block_tokens=a.tokens, vocabulary=a.vocabulary)
        floor = imported_bytes() + 16 * parameters
        turns: dict[str, list[dict[str, float]]] = {"never": [], "always": []}
        for _ in range(a.repeats):
            for way, results in turns.items():
                results.append(turn(folder, way, a))
        result: dict[str, Any] = {
            way: {
                "peak_megabytes": max(r["peak_memory_bytes"] for r in results) / 1e6,
                "above_megabytes": (max(r["peak_memory_bytes"] for r in results) - floor) / 1e6,
                "tokens_per_second": statistics.median(r["tokens_per_second"] for r in results),
                "training_loss": results[0]["training_loss"],
            }
            for way, results in turns.items()
        }
        print(
            json.dumps(
                {
                    "parameters": parameters,
                    "settings": vars(a),
                    "logits_megabytes": 4 * a.sequences * a.tokens * a.vocabulary / 1e6,
                    "result": result,
                },
                indent=2,
            )
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
