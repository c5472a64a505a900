"""How close federated training comes to pooled training at equal tokens, by rule, over languages.

    python tests/bench/federated_quality.py
    python tests/bench/federated_quality.py --experiment it-cs --schedule 30x10 --arms pooled mean --seeds 1
    python tests/bench/federated_quality.py --width 384 --device cuda --seeds 1 --jobs 4

The first runs the whole table (`quality_arms.py`), the most telling rows first; the second some arms of one experiment;
the third the table of a model of 11 M parameters (`quality_sizes.py`), four trainings at a time on one GPU.
`--table further` has the arms of open questions (`quality_further.py`).
A Llama of 2 layers with tied embeddings (0.16 M parameters at width 64, 0.53 M at 128) and a BPE of 1,024 tokens.
Experiment `it-cs`: pretrained on German and French (500 steps), then federated over Italian and Czech; `all-four`: the
same, federated over all four; `random-it-cs`: Italian and Czech from random weights. `--experiment es+pl+nl+ru@de+fr
--data DIR` federates over any languages of which DIR has LANGUAGE/train.jsonl and validation.jsonl, with a tokenizer of
their own, from a base pretrained on those behind the `@` (none: random weights); `dealt:` before one gives each
facility a share of every language in place of one language. Every run is kept in OUT/results.jsonl
and not repeated, so the script can be stopped and started again. Table and plot: `federated_quality_report.py`; the
table of `rule: auto`: `federated_quality_choose.py`. A model is trained on `--device`; the server computes on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import functools
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from coordinator.aggregation.settings import AggregationSettings
from facility.dataset import open_dataset
from tests.bench.federated_baselines import alone, pool, untrained
from tests.bench.federated_codecs import DeltaCodec
from tests.bench.federated_learner import Curve, Learner, Local, Text, batches
from tests.bench.federated_lora import ProductMean, adapt
from tests.bench.federated_rounds import federate
from tests.bench.federated_sparseloco import SparseLoCo
from tests.bench.quality_arms import ARMS, Arm, Cell, table
from tests.bench.quality_further import further
from tests.bench.quality_sizes import size_of
from tests.bench.quality_texts import EXPERIMENTS, LANGUAGES, Experiment, dealt, experiment_of
from tests.bench.quality_workers import spread

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
OUT = Path(__file__).resolve().parents[3] / "quality"
BLOCK, VOCABULARY = 64, 1024


@contextmanager
def alone_at(file: Path) -> Iterator[None]:
    """Nobody else does this at the same time."""
    with open(file, "a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def texts_of(out: Path, data: Path = DATA, languages: Sequence[str] = LANGUAGES) -> dict[str, Text]:
    """Languages prepared with one tokenizer trained on all of them; what was prepared before is opened."""
    out.mkdir(parents=True, exist_ok=True)
    with alone_at(out / "prepare.lock"):
        if not all((out / "datasets" / language).is_dir() for language in languages):
            prepare_texts(out, data, languages)
    texts = {}
    for language in languages:
        dataset = open_dataset(out / "datasets" / language)
        texts[language] = Text(train=dataset.split("train"), validation=dataset.split("validation"))
    return texts


def prepare_texts(out: Path, data: Path, languages: Sequence[str]) -> None:
    from facility.preparing.build import Request, prepare_dataset

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
        files = [data / language / "train.jsonl" for language in languages]
        trained.train_from_iterator((json.loads(line)["text"] for f in files for line in open(f)), trainer)
        fast = PreTrainedTokenizerFast(tokenizer_object=trained, eos_token="<|end|>", pad_token="<|end|>")
        fast.save_pretrained(tokenizer)
    for language in languages:
        request = Request(
            inputs=[str(data / language / "train.jsonl")],
            validation=[str(data / language / "validation.jsonl")],
            tokenizer=tokenizer,
            out=out / "datasets" / language,
            block_tokens=BLOCK,
        )
        prepare_dataset(request)


def new_model(seed: int, width: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = size_of(width)
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=round(width * 8 / 3 / 8) * 8,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    )


def base_model(
    out: Path,
    texts: dict[str, Text],
    seed: int,
    width: int,
    device: str = "cpu",
    languages: Sequence[str] = Experiment.base,
) -> torch.nn.Module:
    """The model pretrained on the base's languages, made once per seed."""
    from safetensors.torch import load_file, save_file

    model, size = new_model(seed, width), size_of(width)
    on = "" if tuple(languages) == Experiment.base else f"-{'+'.join(languages)}"
    file = out / f"base-{width}-{seed}{on}.safetensors"
    with alone_at(file.with_suffix(".lock")):
        if not file.exists():
            local = Local(learning_rate=size.pretraining_rate, batch=8)
            feeds = [batches(texts[name].train, local.batch, seed + 77) for name in languages]
            joined = (torch.cat(pair) for pair in zip(*feeds, strict=True))
            learner = Learner(model.to(device), joined, local, size.pretraining_steps)
            learner.train(size.pretraining_steps)
            save_file({name: p.detach().cpu() for name, p in learner.model.named_parameters()}, file)
    model.load_state_dict(load_file(file), strict=False)
    return model


def key_of(cell: Cell) -> dict[str, Any]:
    """What tells one training from another, and nothing that does not change its result."""
    arm = cell.arm
    rounds, steps = map(int, cell.schedule.split("x"))
    names = ["aggregation", "local", *(["codec", "density"] if arm.codec else [])]
    names += [name for name in ("unlike", "lora", "incomplete") if getattr(arm, name)]
    names += ["unsent_share"] if arm.unsent_share else []
    by_round = arm.kind == "federated" or (arm.kind == "pooled" and arm.unlike)
    return {
        "experiment": cell.experiment,
        "schedule": cell.schedule if by_round else "0 steps" if arm.kind == "base" else f"{rounds * steps} steps",
        "seed": cell.seed,
        "width": cell.width,
        **({"layers": layers} if (layers := size_of(cell.width).layers) != 2 else {}),
        "arm": {n: v for n, v in dataclasses.asdict(arm).items() if n in names}
        | ({} if arm.kind in ("federated", "pooled") else {"kind": arm.kind}),
    }


def kept(out: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The row of an earlier run."""
    file = out / "results.jsonl"
    rows = (json.loads(line) for line in file.read_text().splitlines()) if file.exists() else ()
    return next((row for row in rows if row["key"] == key), None)


def run(cell: Cell, *, out: Path, data: Path = DATA, device: str = "cpu") -> dict[str, Any]:
    """One training, or its kept result."""
    key = key_of(cell)
    if (row := kept(out, key)) is not None:
        return row
    experiment = experiment_of(cell.experiment)
    place = experiment.place(out)
    texts = texts_of(place, data, experiment.all_languages)
    chosen = {language: texts[language] for language in experiment.languages}
    if experiment.dealt and cell.arm.kind != "pooled":
        chosen = dealt(chosen)
    if experiment.base:
        model = base_model(place, texts, cell.seed, cell.width, device, experiment.base)
    else:
        model = new_model(cell.seed, cell.width)
    started = time.perf_counter()
    curve = train(model, chosen, cell, device)
    final = curve.perplexities[-1]
    row = {
        "key": key,
        "name": cell.name,
        "seconds": round(time.perf_counter() - started, 1),
        "perplexity": final,
        "geometric_mean": geometric(list(final.values())),
        "curve": dataclasses.asdict(curve),
        **({"device": device} if device != "cpu" else {}),
    }
    with alone_at(out / "results.lock"), open(out / "results.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    return row


def train(model: torch.nn.Module, texts: dict[str, Text], cell: Cell, device: str = "cpu") -> Curve:
    """Train the way that the cell's arm says."""
    arm = cell.arm
    rounds, steps = map(int, cell.schedule.split("x"))
    local = dataclasses.replace(Local(), **arm.local)
    if arm.lora:
        model = adapt(model, arm.lora["rank"], cell.seed, freeze_a=arm.lora.get("freeze_a", False))
    model = model.to(device)
    if arm.kind == "base":
        return untrained(model, texts)
    if arm.kind == "alone":
        return alone(model, texts, steps=rounds * steps, local=local, seed=cell.seed)
    if arm.kind == "pooled":
        return pool(model, texts, steps=rounds * steps, local=local, seed=cell.seed, unlike=arm.unlike, span=steps)
    coders: list[Any] = [None, None]
    if arm.codec == "sparseloco":
        coders[0] = SparseLoCo(arm.unsent_share)
    elif arm.codec:
        coders = [DeltaCodec(arm.codec, density=arm.density, model=way) for way in (False, True)]
    aggregation = AggregationSettings(**(arm.aggregation or {}))
    every = max(1, rounds // 5)
    return federate(
        model,
        texts,
        rounds=rounds,
        steps=steps,
        local=local,
        aggregation=aggregation,
        seed=cell.seed,
        codec=coders[0],
        downlink=coders[1],
        evaluate_rounds=set(range(every, rounds + 1, every)),
        evaluation_blocks=96,
        unlike=arm.unlike,
        server=ProductMean(aggregation) if arm.lora.get("product") else None,
        trained_ranks=arm.lora.get("trained", ()),
        incomplete=arm.incomplete,
    )


def geometric(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=OUT, help=f"directory for what is made (default {OUT})")
    p.add_argument("--data", type=Path, default=DATA, help=f"directory of LANGUAGE/train.jsonl (default {DATA})")
    p.add_argument("--table", choices=["whole", "further"], default="whole", help="without --experiment")
    known = ", ".join(EXPERIMENTS)
    p.add_argument("--experiment", help=f"{known}, or LANGUAGE+LANGUAGE...[@BASE...] (default: the whole table)")
    p.add_argument("--schedule", default="30x10", help="rounds x local steps (default 30x10; whole table: both)")
    p.add_argument(
        "--arms",
        nargs="+",
        default=list(ARMS),
        metavar="NAME",
        help=f"of {', '.join(ARMS)}, or NAME={{JSON of an arm}}; with --experiment",
    )
    p.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    p.add_argument("--width", type=int, default=64, help="of the Llama (default 64; 128: 0.53 M; 384: 11 M)")
    p.add_argument("--threads", type=int, default=1, help="of one training (with --jobs above 1: one)")
    p.add_argument("--jobs", type=int, default=1, help="trainings at a time, each a process (default 1)")
    p.add_argument("--minutes", type=float, default=0.0, help="begin none that would likely end later; 0: no limit")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of training (default cpu)")
    return p


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """The trainings asked for: the whole table in the order of importance, or the arms of one experiment."""
    if options.experiment is None:
        return (further if options.table == "further" else table)(options.seeds, options.width)
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


def work_of(cell: Cell) -> float:
    """Steps of all facilities."""
    rounds, steps = map(int, cell.schedule.split("x"))
    return float(rounds * steps * len(experiment_of(cell.experiment).languages) * (cell.arm.kind != "base"))


def main() -> int:
    options = parser().parse_args()
    if options.experiment:
        try:
            experiment_of(options.experiment)
        except ValueError as error:
            parser().error(str(error))
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    made = functools.partial(run, out=options.out, data=options.data, device=options.device)
    done = spread(
        cells_of(options),
        made,
        jobs=options.jobs,
        minutes=options.minutes,
        kind=lambda cell: f"{cell.arm.kind} {cell.width}",
        work=work_of,
    )
    for cell, row in done:
        told = {"arm": cell.name, "experiment": cell.experiment, "schedule": cell.schedule, "seed": cell.seed}
        if row is not None:
            told |= {
                "seconds": row["seconds"],
                "perplexity": {language: round(value, 2) for language, value in row["perplexity"].items()},
                "geometric_mean": round(row["geometric_mean"], 3),
            }
        print(json.dumps(told | ({} if row is not None else {"skipped": True})), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
