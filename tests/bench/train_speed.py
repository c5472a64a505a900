"""Tokens a second against Hugging Face's Trainer: same model, data, precision, processes and batch, side by side.

    python tests/bench/train_speed.py [--ranks 2] [--repeats 3] [--device cuda --dtype bfloat16 ...]

One process: our trainer against `Trainer`. Several: our FSDP2 against `Trainer` over transformers' own FSDP2
(`DistributedConfig(fsdp_size=N)`, where this transformers has it), and our replicas against `Trainer` under DDP. The
two take turns, `--repeats` times; first in turn; a turn's rate is that of its steps from the second on, the median
over turns counts. With the default sizes a kind takes about a minute on an idle machine of two cores. Prints JSON.
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
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))


def spawn(command: list[str], ranks: int) -> list[str]:
    """Run the command on so many processes; the output of each."""
    from tests.distributed import free_port

    port, processes = free_port(), []
    for rank in range(ranks):
        variables = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
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


def ours(folder: Path, a: argparse.Namespace, kind: str) -> float:
    """Tokens a second of `facility.train`, first steps left out as for Trainer."""
    from facility.exchange.messages.report import read_report

    layout = {"fsdp2": {}, "ddp": {"sharding": "NO_SHARD"}, "single": {}}[kind] | {"compile": a.compile}
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
            str(folder / "data"),
            "--settings",
            str(folder / "settings.json"),
            "--round",
            "0",
            "--out",
            str(out),
            "--state",
            str(folder / "state"),
        ],
        1 if kind == "single" else a.ranks,
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
        1 if kind == "single" else a.ranks,
    )
    return float(json.loads(outputs[0].strip().splitlines()[-1])["tokens_per_second"])


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
    p.add_argument("--ranks", type=int, default=2, help="processes")
    p.add_argument("--repeats", type=int, default=3, help="turns of each")
    p.add_argument("--steps", type=int, default=10, help="optimizer steps a turn; the first two are not counted")
    p.add_argument("--batch", type=int, default=4, help="sequences a step over all processes")
    p.add_argument("--micro", type=int, default=0, help="sequences a forward pass; 0: what the batch gives a process")
    p.add_argument("--tokens", type=int, default=256, help="tokens a sequence")
    p.add_argument("--hidden", type=int, default=256, help="width of the Llama")
    p.add_argument("--layers", type=int, default=4, help="blocks of the Llama")
    p.add_argument("--vocabulary", type=int, default=8192, help="tokens of the vocabulary")
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--threads", type=int, default=1, help="CPU threads a process")
    p.add_argument("--kinds", default="single,ddp,fsdp2", help="which comparisons, by commas")
    p.add_argument("--compile", action="store_true", help="torch.compile for both")
    p.add_argument("--trainer", help=argparse.SUPPRESS)
    p.add_argument("--folder", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.trainer:
        return run_trainer(a)
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
        write_dataset(folder / "data", train=a.batch * a.steps, block_tokens=a.tokens, vocabulary=a.vocabulary)
        result: dict[str, Any] = {}
        for kind in a.kinds.split(","):
            rates: dict[str, list[float]] = {"ours": [], "trainer": []}
            try:
                for turn in range(a.repeats):
                    contenders = [("ours", ours), ("trainer", theirs)]
                    for name, run in contenders if turn % 2 == 0 else contenders[::-1]:
                        rates[name].append(run(folder, a, kind))
            except RuntimeError as error:
                result[kind] = {"failed": str(error)[-1500:]}
                continue
            median = {name: statistics.median(values) for name, values in rates.items()}
            result[kind] = {"tokens_per_second": rates, "median": median, "ratio": median["ours"] / median["trainer"]}
        print(
            json.dumps(
                {"parameters": parameters, "settings": vars(a), "cores": os.cpu_count(), "result": result}, indent=2
            )
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
