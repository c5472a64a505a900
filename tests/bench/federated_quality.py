"""How close federated training comes to pooled training at equal tokens, by rule, over languages.

    python tests/bench/federated_quality.py --out /tmp/quality --experiment it-cs --schedule 30x10 --seeds 1 2 3

A Llama of 2 layers with tied embeddings (0.16 M parameters at width 64, 0.53 M at 128) and a BPE of 1,024 tokens.
Experiment `it-cs`: pretrained on German and French (500 steps), then federated over Italian and Czech; `all-four`: the
same, federated over all four. Every run is kept in OUT/results.jsonl and not repeated. Table and plot:
`federated_quality_report.py`.
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
from facility.exchange.messages.settings import SPARSE_DENSITY
from facility.preparing.build import Request, prepare
from tests.bench.federated_codecs import DeltaCodec
from tests.bench.federated_learner import Curve, Learner, Local, Text, batches, federate, pool

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
LANGUAGES = ("it", "cs", "de", "fr")
EXPERIMENTS = {"it-cs": ("it", "cs"), "all-four": ("it", "cs", "de", "fr")}
BLOCK, VOCABULARY, PRETRAINING_STEPS = 64, 1024, 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train."""

    aggregation: dict[str, Any] | None
    """Fields of AggregationSettings; None: pooled."""
    local: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of Local that differ."""
    codec: str | None = None
    """What travels both ways instead of bfloat16: delta-int8, delta-int4 or sparse."""
    density: float = SPARSE_DENSITY
    """Of `sparse`."""


RATE = {"learning_rate": 2e-3}
ARMS = {
    "pooled": Arm(aggregation=None, local=RATE),
    "mean, fresh optimizer": Arm(aggregation={"rule": "mean"}, local=RATE | {"keep_optimizer": False}),
    "mean": Arm(aggregation={"rule": "mean"}, local=RATE),
    "fedprox": Arm(aggregation={"rule": "mean"}, local=RATE | {"proximal": 0.01}),
    "fedadam": Arm(aggregation={"rule": "fedadam", "server_learning_rate": 1e-2, "momentum": 0.5}, local=RATE),
    "nesterov": Arm(aggregation={"rule": "nesterov", "server_learning_rate": 1.0, "momentum": 0.8}, local=RATE),
    "nesterov, shared second moments": Arm(
        aggregation={"rule": "nesterov", "server_learning_rate": 1.0, "momentum": 0.8},
        local=RATE | {"optimizer_state": "shared"},
    ),
    "nesterov, constant momentum": Arm(
        aggregation={"rule": "nesterov", "server_learning_rate": 0.8, "momentum": 0.7, "momentum_warmup": False},
        local=RATE,
    ),
    "nesterov, constant momentum, fresh optimizer": Arm(
        aggregation={"rule": "nesterov", "server_learning_rate": 0.8, "momentum": 0.7, "momentum_warmup": False},
        local=RATE | {"keep_optimizer": False},
    ),
}


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


def run(out: Path, experiment: str, schedule: str, name: str, arm: Arm, seed: int, width: int) -> dict[str, Any]:
    """One training, or its kept result."""
    rounds, steps = map(int, schedule.split("x"))
    key = {
        "experiment": experiment,
        "schedule": schedule if arm.aggregation else f"{rounds * steps} steps",
        "seed": seed,
        "width": width,
        "arm": {
            n: v
            for n, v in dataclasses.asdict(arm).items()
            if n in ("aggregation", "local") or (arm.codec and n in ("codec", "density"))
        },
    }
    kept = out / "results.jsonl"
    for line in kept.read_text().splitlines() if kept.exists() else []:
        row = json.loads(line)
        if row["key"] == key:
            return row
    texts = texts_of(out)
    chosen = {language: texts[language] for language in EXPERIMENTS[experiment]}
    model = base_model(out, texts, seed, width)
    local = dataclasses.replace(Local(), **arm.local)
    started = time.perf_counter()
    curve: Curve
    coders: list[Any] = [None, None]
    if arm.codec:
        coders = [DeltaCodec(arm.codec, density=arm.density, model=way) for way in (False, True)]
    if arm.aggregation is None:
        curve = pool(model, chosen, steps=rounds * steps, local=local, seed=seed)
    else:
        every = max(1, rounds // 5)
        curve = federate(
            model,
            chosen,
            rounds=rounds,
            steps=steps,
            local=local,
            aggregation=AggregationSettings(**arm.aggregation),
            seed=seed,
            codec=coders[0],
            downlink=coders[1],
            evaluate_rounds=set(range(every, rounds + 1, every)),
            evaluation_blocks=96,
        )
    final = curve.perplexities[-1]
    row = {
        "key": key,
        "name": name,
        "seconds": round(time.perf_counter() - started, 1),
        "perplexity": final,
        "geometric_mean": geometric(list(final.values())),
        "curve": dataclasses.asdict(curve),
    }
    with open(kept, "a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def geometric(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory outside the repository for what is made")
    parser.add_argument("--experiment", choices=EXPERIMENTS, default="it-cs")
    parser.add_argument("--schedule", default="30x10", help="rounds x local steps (default 30x10)")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=list(ARMS),
        metavar="NAME",
        help=f"of {', '.join(ARMS)}, or NAME={{JSON of an arm}}",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--width", type=int, default=64, help="of the Llama (default 64; 128 has 0.53 M parameters)")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    for seed in options.seeds:
        for given in options.arms:
            name, _, text = given.partition("=")
            arm = Arm(**json.loads(text)) if text else ARMS[name]
            row = run(options.out, options.experiment, options.schedule, name, arm, seed, options.width)
            shown = {language: round(value, 2) for language, value in row["perplexity"].items()}
            print(
                json.dumps(
                    {
                        "arm": name,
                        "seed": seed,
                        "schedule": options.schedule,
                        "seconds": row["seconds"],
                        "perplexity": shown,
                        "geometric_mean": round(row["geometric_mean"], 3),
                    }
                ),
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
