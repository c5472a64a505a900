"""How close federated training comes to pooled training at equal tokens, by rule, over languages.

    python tests/bench/federated_quality.py
    python tests/bench/federated_quality.py --experiment it-cs --schedule 30x10 --arms pooled mean --seeds 1

The first runs the whole table (`quality_arms.py`), the most telling rows first; the second some arms of one experiment.
A Llama of 2 layers with tied embeddings (0.16 M parameters at width 64, 0.53 M at 128) and a BPE of 1,024 tokens.
Experiment `it-cs`: pretrained on German and French (500 steps), then federated over Italian and Czech; `all-four`: the
same, federated over all four; `random-it-cs`: Italian and Czech from random weights. Every run is kept in
OUT/results.jsonl and not repeated, so the script can be stopped and started again. Table and plot:
`federated_quality_report.py`; the table of `rule: auto`: `federated_quality_choose.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from coordinator.aggregation.settings import AggregationSettings
from facility.dataset import open_dataset
from facility.preparing.build import Request, prepare
from tests.bench.federated_codecs import DeltaCodec
from tests.bench.federated_learner import Curve, Learner, Local, Text, alone, batches, federate, pool, untrained
from tests.bench.quality_arms import ARMS, Arm, Cell, table

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
LANGUAGES = ("it", "cs", "de", "fr")
EXPERIMENTS = {"it-cs": ("it", "cs"), "all-four": ("it", "cs", "de", "fr"), "random-it-cs": ("it", "cs")}
OUT = Path(__file__).resolve().parents[3] / "quality"
BLOCK, VOCABULARY, PRETRAINING_STEPS = 64, 1024, 500


def texts_of(out: Path) -> dict[str, Text]:
    """The four languages, prepared with one tokenizer trained on all of them."""
    tokenizer = out / "tokenizer"
    if not tokenizer.is_dir():
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        from transformers import PreTrainedTokenizerFast

        trained = Tokenizer(models.BPE())
        trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trained.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=["<|end|>"],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        files = [DATA / language / "train.jsonl" for language in LANGUAGES]
        trained.train_from_iterator((json.loads(line)["text"] for f in files for line in open(f)), trainer)
        fast = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|end|>", pad_token="<|end|>")
        fast.save_pretrained(tokenizer)
    texts = {}
    for language in LANGUAGES:
        request = Request(
            inputs=[str(DATA / language / "train.jsonl")],
            validation=[str(DATA / language / "validation.jsonl")],
            tokenizer=tokenizer,
            out=out / "datasets" / language,
            block_tokens=BLOCK,
        )
        prepare(request)
        dataset = open_dataset(request.out)
        texts[language] = Text(train=dataset.split("train"), validation=dataset.split("validation"))
    return texts


def new_model(seed: int, width: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=round(width * 8 / 3 / 8) * 8,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    )


def base_model(out: Path, texts: dict[str, Text], seed: int, width: int) -> torch.nn.Module:
    """The model pretrained on German and French, made once per seed."""
    from safetensors.torch import load_file, save_file

    model = new_model(seed, width)
    file = out / f"base-{width}-{seed}.safetensors"
    if not file.exists():
        local = Local(learning_rate=2e-3, batch=8)
        feeds = [batches(texts[name].train, local.batch, seed + 77) for name in ("de", "fr")]
        learner = Learner(model, (torch.cat(pair) for pair in zip(*feeds, strict=True)), local, PRETRAINING_STEPS)
        learner.train(PRETRAINING_STEPS)
        save_file({name: p.detach() for name, p in learner.model.named_parameters()}, file)
    model.load_state_dict(load_file(file), strict=False)
    return model


def key_of(cell: Cell) -> dict[str, Any]:
    """What tells one training from another, and nothing that does not change its result."""
    arm = cell.arm
    rounds, steps = map(int, cell.schedule.split("x"))
    names = ["aggregation", "local", *(["codec", "density"] if arm.codec else []), *(["unlike"] if arm.unlike else [])]
    return {
        "experiment": cell.experiment,
        "schedule": {"federated": cell.schedule, "base": "0 steps"}.get(arm.kind, f"{rounds * steps} steps"),
        "seed": cell.seed,
        "width": cell.width,
        "arm": {n: v for n, v in dataclasses.asdict(arm).items() if n in names}
        | ({} if arm.kind in ("federated", "pooled") else {"kind": arm.kind}),
    }


def kept(out: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The row of an earlier run."""
    file = out / "results.jsonl"
    rows = (json.loads(line) for line in file.read_text().splitlines()) if file.exists() else ()
    return next((row for row in rows if row["key"] == key), None)


def run(out: Path, cell: Cell) -> dict[str, Any]:
    """One training, or its kept result."""
    key = key_of(cell)
    if (row := kept(out, key)) is not None:
        return row
    texts = texts_of(out)
    chosen = {language: texts[language] for language in EXPERIMENTS[cell.experiment]}
    random = cell.experiment.startswith("random")
    model = new_model(cell.seed, cell.width) if random else base_model(out, texts, cell.seed, cell.width)
    started = time.perf_counter()
    curve = train(model, chosen, cell)
    final = curve.perplexities[-1]
    row = {
        "key": key,
        "name": cell.name,
        "seconds": round(time.perf_counter() - started, 1),
        "perplexity": final,
        "geometric_mean": geometric(list(final.values())),
        "curve": dataclasses.asdict(curve),
    }
    with open(out / "results.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def train(model: torch.nn.Module, texts: dict[str, Text], cell: Cell) -> Curve:
    """Train the way that the cell's arm says."""
    arm = cell.arm
    rounds, steps = map(int, cell.schedule.split("x"))
    local = dataclasses.replace(Local(), **arm.local)
    if arm.kind == "base":
        return untrained(model, texts)
    if arm.kind == "alone":
        return alone(model, texts, steps=rounds * steps, local=local, seed=cell.seed)
    if arm.kind == "pooled":
        return pool(model, texts, steps=rounds * steps, local=local, seed=cell.seed)
    coders: list[Any] = [None, None]
    if arm.codec:
        coders = [DeltaCodec(arm.codec, density=arm.density, model=way) for way in (False, True)]
    every = max(1, rounds // 5)
    return federate(
        model,
        texts,
        rounds=rounds,
        steps=steps,
        local=local,
        aggregation=AggregationSettings(**(arm.aggregation or {})),
        seed=cell.seed,
        codec=coders[0],
        downlink=coders[1],
        evaluate_rounds=set(range(every, rounds + 1, every)),
        evaluation_blocks=96,
        unlike=arm.unlike,
    )


def geometric(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=OUT, help=f"directory for what is made (default {OUT})")
    p.add_argument("--experiment", choices=EXPERIMENTS, help="default: the whole table, both")
    p.add_argument("--schedule", default="30x10", help="rounds x local steps (default 30x10; whole table: both)")
    p.add_argument(
        "--arms",
        nargs="+",
        default=list(ARMS),
        metavar="NAME",
        help=f"of {', '.join(ARMS)}, or NAME={{JSON of an arm}}; with --experiment",
    )
    p.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    p.add_argument("--width", type=int, default=64, help="of the Llama (default 64; 128 has 0.53 M parameters)")
    p.add_argument("--threads", type=int, default=1)
    return p


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """The trainings asked for: the whole table in the order of importance, or the arms of one experiment."""
    if options.experiment is None:
        return table(options.seeds, options.width)
    arms = []
    for given in options.arms:
        name, _, text = given.partition("=")
        arms.append((name, Arm(**json.loads(text)) if text else ARMS[name]))
    return [
        Cell(
            name=name,
            arm=arm,
            experiment=options.experiment,
            schedule=options.schedule,
            seed=seed,
            width=options.width,
        )
        for seed in options.seeds
        for name, arm in arms
    ]


def main() -> int:
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    for cell in cells_of(options):
        row = run(options.out, cell)
        told = {
            "arm": cell.name,
            "experiment": cell.experiment,
            "schedule": cell.schedule,
            "seed": cell.seed,
            "seconds": row["seconds"],
            "perplexity": {language: round(value, 2) for language, value in row["perplexity"].items()},
            "geometric_mean": round(row["geometric_mean"], 3),
        }
        print(json.dumps(told), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
