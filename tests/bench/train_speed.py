"""Tokens a second against Hugging Face's Trainer: same model, data, precision, processes and batch, turn about.

    python tests/bench/train_speed.py [--ranks 2] [--repeats 3] [--device cuda --dtype bfloat16 ...]

One process: our trainer against `Trainer`. Several: our FSDP2 against `Trainer` over transformers' own FSDP2
(`DistributedConfig(fsdp_size=N)`, where this transformers has it), and our replicas against `Trainer` under DDP.
`documents`: documents packed into blocks, each attending to itself only, against one document a padded block, both by
our trainer, in tokens of documents a second. The two take turns, `--repeats` times, first in turn; a turn's rate is
that of its steps from the second on. Beside it stand the CPU seconds of the whole turn over all of its processes,
start-up included. A ratio is given only where no turn's own ratio is further than `MOST_SPREAD` from the median: on a
machine that does other work it is none. With the default sizes a kind takes about a minute on two idle cores. Prints
JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.asked import at_least, names_of

ROOT = Path(__file__).resolve().parents[2]
MOST_SPREAD = 0.1
"""Largest relative distance of a turn's ratio from the median of all turns' ratios."""
OURS = {"fsdp2": {}, "ddp": {"sharding": "NO_SHARD"}, "single": {}, "documents": {}}
ALONE = ("single", "documents")
"""Kinds that one process runs."""


def cpu_seconds() -> float:
    """Of all processes that ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compared(turns: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """What both did in each turn, and their ratio where the turns agree on one."""
    first, second = turns
    ratios = [one["rate"] / other["rate"] for one, other in zip(turns[first], turns[second], strict=True)]
    middle = statistics.median(ratios)
    spread = max(abs(ratio / middle - 1) for ratio in ratios)
    found: dict[str, Any] = {
        name: {
            "tokens_per_second": [round(turn["rate"], 1) for turn in own],
            "cpu_seconds": [round(turn["cpu"], 2) for turn in own],
        }
        for name, own in turns.items()
    }
    found["ratio"] = round(middle, 3) if spread <= MOST_SPREAD and len(ratios) > 2 else None
    if found["ratio"] is None:
        found["why_no_ratio"] = f"ratios of {len(ratios)} turns: {min(ratios):.2f} to {max(ratios):.2f}"
    return found


def spawn(command: list[str], ranks: int) -> list[str]:
    """Run the command on so many processes; the output of each."""
    from tests.ports import free_port

    port, processes = free_port(), []
    for rank in range(ranks):
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if ranks > 1:
            variables |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "MASTER_ADDR": "127.0.0.1",
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_PORT": str(port),
            }
        processes.append(
            subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    outputs = []
    for process in processes:
        output, errors = process.communicate(timeout=1200)
        if process.returncode != 0:
            for other in processes:
                other.kill()
            raise RuntimeError(f"{command[:4]} ended with {process.returncode}:\n{errors[-3000:]}")
        outputs.append(output)
    return outputs


def ours(folder: Path, a: argparse.Namespace, kind: str, data: str = "data") -> float:
    """Tokens a second of `facility.train`, first steps left out as for Trainer; of `data`."""
    from facility.exchange.messages.report import read_report

    layout = OURS[kind] | {"compile": a.compile}
    settings = {
        "federation": "bench",
        "facility": "here",
        "rounds": 1,
        "seed": 0,
        "training": {
            "steps": a.steps,
            "batch_sequences": a.batch,
            "micro_batch_sequences": a.micro,
            "learning_rate": 1e-4,
            "compute_dtype": a.dtype,
            "device": a.device,
            "threads": a.threads,
            "evaluation_sequences": 1,
            "keep_optimizer": False,
            "layout": layout,
        },
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    spawn(
        [
            sys.executable,
            "-m",
            "facility.train",
            "--model",
            str(folder / "model"),
            "--dataset",
            str(folder / data),
            "--settings",
            str(folder / "settings.json"),
            "--round",
            "0",
            "--out",
            str(out),
            "--state",
            str(folder / "state"),
        ],
        1 if kind in ALONE else a.ranks,
    )
    report = read_report(out)
    return float(report.details["tokens_per_second_steady"])


def theirs(folder: Path, a: argparse.Namespace, kind: str) -> float:
    """Tokens a second of `Trainer`, from the end of its second step on."""
    outputs = spawn(
        [
            sys.executable,
            __file__,
            "--trainer",
            kind,
            "--folder",
            str(folder),
            "--steps",
            str(a.steps),
            "--batch",
            str(a.batch),
            "--micro",
            str(a.micro),
            "--dtype",
            a.dtype,
            "--device",
            a.device,
            "--ranks",
            str(a.ranks),
            "--threads",
            str(a.threads),
            *(["--compile"] if a.compile else []),
        ],
        1 if kind in ALONE else a.ranks,
    )
    return float(json.loads(outputs[0].strip().splitlines()[-1])["tokens_per_second"])


def document_rate(folder: Path, a: argparse.Namespace, data: str) -> float:
    """Tokens of documents a second: what is filled up counts for nothing."""
    from facility.dataset import open_dataset

    split = open_dataset(folder / data).manifest.splits["train"]
    return ours(folder, a, "documents", data) * split.tokens / (split.blocks * a.tokens)


def write_documents(directory: Path, a: argparse.Namespace, *, alone: bool) -> None:
    """Documents of unlike lengths, packed into blocks or one a block; those of both are the same."""
    from facility.dataset import NAME, DatasetManifest, SplitEntry
    from facility.exchange.messages.manifest import sha256_of
    from facility.preparing.encoding import EncodedBatch
    from facility.preparing.marked import WholeDocuments

    directory.mkdir()
    splits = {}
    for name, blocks in (("train", a.batch * a.steps), ("validation", 1)):
        draw = np.random.default_rng(0)
        lengths = draw.integers(a.tokens // 8, a.tokens // 2, size=blocks if alone else 4 * blocks)
        writer = WholeDocuments(directory, name, a.tokens, filler=0, alone=alone)
        ids = draw.integers(1, a.vocabulary, size=int(lengths.sum())).astype(np.int32)
        loss = np.ones(len(ids), dtype=np.uint8)
        writer.append(EncodedBatch(tokens=ids, lengths=lengths, seconds=lengths, loss=loss), [])
        writer.close()
        splits[name] = SplitEntry(
            blocks=writer.blocks,
            documents=len(lengths),
            empty_documents=0,
            tokens=writer.tokens,
            tail_tokens=0,
            sha256=sha256_of(directory / f"{name}.npy"),
            marks_sha256=sha256_of(directory / f"{name}.marks.npy"),
        )
    manifest = DatasetManifest(
        task="chat",
        documents="padded" if alone else "separate",
        block_tokens=a.tokens,
        vocabulary_size=a.vocabulary,
        tokenizer_sha256="0" * 64,
        template="",
        splits=splits,
        sources=[],
    )
    (directory / NAME).write_text(json.dumps(dataclasses.asdict(manifest)))


def turns_of(folder: Path, a: argparse.Namespace, kind: str) -> dict[str, list[dict[str, float]]]:
    """The rate and the CPU seconds of each side in each turn; who begins changes from turn to turn."""
    sides: dict[str, Callable[[], float]] = {
        "ours": lambda: ours(folder, a, kind),
        "trainer": lambda: theirs(folder, a, kind),
    }
    if kind == "documents":
        sides = {name: partial(document_rate, folder, a, name) for name in ("packed", "padded")}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(a.repeats):
        for name in list(sides) if turn % 2 == 0 else list(sides)[::-1]:
            before = cpu_seconds()
            rate = sides[name]()
            turns[name].append({"rate": rate, "cpu": cpu_seconds() - before})
    return turns


def run_trainer(a: argparse.Namespace) -> None:
    """What a rank of the opponent does."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.set_num_threads(a.threads)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    ids = np.load(Path(a.folder) / "data" / "train.npy")
    options: dict[str, Any] = {"dtype": torch.float32}
    if a.trainer == "fsdp2":
        from transformers.distributed import DistributedConfig

        torch.distributed.init_process_group("nccl" if a.device == "cuda" else "gloo")
        options["distributed_config"] = DistributedConfig(fsdp_size=world)
    model = AutoModelForCausalLM.from_pretrained(Path(a.folder) / "model", **options)
    model.config.use_cache = False
    per_rank = a.batch // world
    micro = a.micro or per_rank
    marks: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            if a.device == "cuda":
                torch.cuda.synchronize()
            marks.append(time.perf_counter())

    class Blocks(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(ids)

        def __getitem__(self, index: int) -> dict[str, Any]:
            row = torch.from_numpy(ids[index].astype(np.int64))
            return {"input_ids": row, "labels": row}

    trainer = Trainer(
        model=model,
        train_dataset=Blocks(),
        callbacks=[Clock()],
        args=TrainingArguments(
            output_dir=str(Path(a.folder) / "trainer"),
            max_steps=a.steps,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=per_rank // micro,
            learning_rate=1e-4,
            max_grad_norm=1.0,
            adam_beta2=0.95,
            save_strategy="no",
            report_to=[],
            logging_steps=1_000_000,
            disable_tqdm=True,
            use_cpu=a.device == "cpu",
            bf16=a.dtype == "bfloat16",
            torch_compile=a.compile,
            dataloader_pin_memory=a.device == "cuda",
        ),
    )
    trainer.train()
    if int(os.environ.get("RANK", "0")) == 0:
        tokens = (a.steps - 2) * a.batch * ids.shape[1]
        print(json.dumps({"tokens_per_second": tokens / (marks[-1] - marks[1])}))
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--ranks", type=at_least(1), default=2, help="processes of ddp and fsdp2, 2 or more")
    p.add_argument("--repeats", type=at_least(1), default=3, help="turns of each")
    p.add_argument(
        "--steps", type=at_least(3), default=10, help="optimizer steps a turn; the first two are not counted"
    )
    p.add_argument("--batch", type=int, default=4, help="sequences a step over all processes")
    p.add_argument("--micro", type=int, default=0, help="sequences a forward pass; 0: what the batch gives a process")
    p.add_argument("--tokens", type=int, default=256, help="tokens a sequence")
    p.add_argument("--hidden", type=int, default=256, help="width of the Llama")
    p.add_argument("--layers", type=int, default=4, help="blocks of the Llama")
    p.add_argument("--vocabulary", type=int, default=8192, help="tokens of the vocabulary")
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--threads", type=int, default=1, help="CPU threads a process")
    p.add_argument(
        "--kinds", type=names_of(OURS), default="single,ddp,fsdp2,documents", help="which comparisons, by commas"
    )
    p.add_argument("--compile", action="store_true", help="torch.compile for both")
    p.add_argument("--trainer", help=argparse.SUPPRESS)
    p.add_argument("--folder", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.trainer:
        return run_trainer(a)
    if a.ranks < 2 and (several := [kind for kind in a.kinds if kind not in ALONE]):
        p.error(f"argument --ranks: found {a.ranks}, expected 2 or more for {' and '.join(several)}, or --kinds single")
    from transformers import AutoModelForCausalLM, LlamaConfig

    from tests.training.federation import write_dataset

    folder = Path(tempfile.mkdtemp(prefix="train-speed-"))
    try:
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(
                hidden_size=a.hidden,
                intermediate_size=4 * a.hidden,
                num_hidden_layers=a.layers,
                num_attention_heads=8,
                vocab_size=a.vocabulary,
                max_position_embeddings=a.tokens,
            )
        )
        model.save_pretrained(folder / "model")
        parameters = sum(p.numel() for p in model.parameters())
        write_documents(folder / "packed", a, alone=False)
        write_documents(folder / "padded", a, alone=True)
        write_dataset(folder / "data", train=a.batch * a.steps, block_tokens=a.tokens, vocabulary=a.vocabulary)
        result: dict[str, Any] = {}
        for kind in a.kinds:
            try:
                result[kind] = compared(turns_of(folder, a, kind))
            except RuntimeError as error:
                result[kind] = {"failed": str(error)[-1500:]}
        print(
            json.dumps(
                {"parameters": parameters, "settings": vars(a), "cores": os.cpu_count(), "result": result}, indent=2
            )
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
