"""A federation of Italian and Czech beside pooled training on both, by the real steps, at equal tokens.

    python tests/bench/federated_pooled.py --out /tmp/it-cs

Runs `facility.prepare`, `facility.train` and `coordinator.aggregate` as commands, one after the other, on
`../shared/data` (JSONL). A Llama of 1.3 M parameters with random weights; 5 rounds. The pooled model sees both texts
with the batches of both facilities in every step. Prints the table as Markdown and the figures as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

from coordinator.demo import Sizes, make_model, train_tokenizer
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.messages.report import read_report
from facility.exchange.messages.settings import FacilitySettings, TrainingSettings

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
TEMPLATES = {"it": "Scrivi un documento: {text}{eos}", "cs": "Napište dokument: {text}{eos}"}
SIZES = Sizes(vocabulary=2048, block_tokens=64, hidden=160, layers=3, heads=4, intermediate=432)


def command(*arguments: object) -> None:
    """Run a module of the project; its failure ends the benchmark with its own message."""
    subprocess.run([sys.executable, "-m", *map(str, arguments)], check=True, cwd=ROOT, stdout=sys.stderr)


def train(
    out: Path, name: str, model: Path, dataset: Path, number: int, rounds: int, training: TrainingSettings
) -> Path:
    """One `facility.train`; past the last round it only evaluates. Returns the update's directory."""
    settings = FacilitySettings(federation="demo", facility=name, rounds=rounds, seed=1, training=training)
    file = out / f"{name}.json"
    file.write_text(json.dumps(dataclasses.asdict(settings)))
    update = out / f"update-{name}-{number}"
    if update.is_dir():
        return update
    command(
        "facility.train",
        "--model",
        model,
        "--dataset",
        dataset,
        "--settings",
        file,
        "--round",
        number,
        "--out",
        update,
        "--state",
        out / f"state-{name}",
    )
    return update


def aggregate(out: Path, label: str, base: Path, updates: list[Path], number: int, settings: Path) -> Path:
    """One `coordinator.aggregate`; returns the next model's directory."""
    model = out / f"model-{label}-{number + 1}"
    before = out / f"server-{label}-{number}"
    if model.is_dir():
        return model
    arguments = [a for update in updates for a in ("--update", update)]
    command(
        "coordinator.aggregate",
        "--base",
        base,
        *arguments,
        "--out",
        model,
        "--settings",
        settings,
        "--state-out",
        out / f"server-{label}-{number + 1}",
        *(["--state-in", before] if number else []),
    )
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="directory outside the repository; what it holds is not made again"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="local steps per round (default 30)")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--warmup-steps", type=int, default=100, help="of the federation's steps (default 100)")
    parser.add_argument(
        "--aggregation", default='{"rule": "mean"}', metavar="JSON", help="fields of the aggregation settings"
    )
    options = parser.parse_args()
    out: Path = options.out
    for name in TEMPLATES:
        (out / "text" / name).mkdir(parents=True, exist_ok=True)
        (out / "text" / name / "train.jsonl").write_bytes((DATA / name / "train.jsonl").read_bytes())
    if not (out / "model").is_dir():
        make_model(out, train_tokenizer(out, SIZES, names=tuple(TEMPLATES)), SIZES, 1)
    parameters = open_checkpoint(out / "model").parameters
    for name, template in [*TEMPLATES.items(), ("pooled", "{text}{eos}")]:
        languages = list(TEMPLATES) if name == "pooled" else [name]
        command(
            "facility.prepare",
            "--input",
            *(DATA / n / "train.jsonl" for n in languages),
            "--validation",
            *(DATA / n / "validation.jsonl" for n in languages),
            "--tokenizer",
            out / "tokenizer",
            "--out",
            out / "data" / name,
            "--block-tokens",
            SIZES.block_tokens,
            "--template",
            template,
            "--model",
            out / "model",
            "--offline",
        )
    settings = out / "aggregation.json"
    settings.write_text(options.aggregation)
    training = TrainingSettings(
        steps=options.steps,
        batch_sequences=16,
        learning_rate=options.learning_rate,
        warmup_steps=options.warmup_steps,
        threads=1,
    )
    started = time.perf_counter()
    model, curve = out / "model", []
    for number in range(options.rounds + 1):
        updates = [train(out, n, model, out / "data" / n, number, options.rounds, training) for n in TEMPLATES]
        reports = [read_report(update) for update in updates]
        curve.append({r.facility: r.perplexity_received for r in reports})
        print(f"global model of round {number}: {curve[-1]}", file=sys.stderr, flush=True)
        if number < options.rounds:
            model = aggregate(out, "federated", model, updates, number, settings)
    both = dataclasses.replace(training, steps=options.rounds * options.steps, batch_sequences=32)
    update = train(out, "pooled", out / "model", out / "data" / "pooled", 0, 1, both)
    tokens = read_report(update).tokens
    plain = out / "plain.json"
    plain.write_text('{"rule": "mean"}')
    final = aggregate(out, "pooled", out / "model", [update], 0, plain)
    pooled = {}
    for name in TEMPLATES:
        pooled[name] = read_report(
            train(out, name + "-of-pooled", final, out / "data" / name, 1, 1, both)
        ).perplexity_received
    print("| global model after round | it | cs |\n|---|---|---|")
    for number, row in enumerate(curve):
        print(f"| {number} | {row['it']:.1f} | {row['cs']:.1f} |")
    print(f"| pooled, the same {tokens:,} tokens | {pooled['it']:.1f} | {pooled['cs']:.1f} |")
    falls = all(after[n] < before[n] for before, after in zip(curve, curve[1:], strict=False) for n in TEMPLATES)
    print(
        json.dumps(
            {
                "parameters": parameters,
                "rounds": options.rounds,
                "steps": options.steps,
                "tokens": tokens,
                "federated": curve,
                "pooled": pooled,
                "falls_every_round": falls,
                "seconds": round(time.perf_counter() - started, 1),
            }
        )
    )
    return 0 if falls else 1


if __name__ == "__main__":
    sys.exit(main())
