"""Loss under partial reduce (and others) against all-reduce: after equal wall time and after equal updates.

Four real processes go on training a small Llama, pretrained here on German and French, on other real text (bytes of
`../shared/data/<language>`), each on every fourth block; the learning rate warms up and decays (`--constant`: it does
not; `--pretrain 0`: from random weights). A forward and a backward pass last 70 and 140 ms, stalled and slowed by
the shared law as in `sync_speed.py`: what the real ones leave of that is slept. For each row: all-reduce makes N steps
and takes T seconds; each policy then makes as many updates as all-reduce made, and once more runs for T seconds (its
learning rate decays over the updates that its speed promises). What is compared is the validation loss of the averaged
model that `finish` leaves on every process. The row of pipelines is scaled down to four pipelines of two stages (eight
processes), never flushed, weights stashed.

    python tests/bench/sync_quality.py --steps 120 --out sync_quality.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from facility.exchange.messages.emulation import Emulation
from facility.exchange.messages.sync import SyncSettings
from facility.exchange.scheduling.policies import POLICIES
from tests.bench.asked import at_least
from tests.ports import free_port

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
WORKERS, BLOCK, BATCH = 4, 64, 8
FORWARD, BACKWARD = 0.07, 0.14
OVERLAPPED = 0.06
"""Seconds at the end of an emulated backward pass in which the real one runs, and gradients may be exchanged."""
ROWS = {
    "none": Emulation(),
    "stall 0.1": Emulation(probability=0.1, seconds=0.1, seed=1),
    "stall 0.2": Emulation(probability=0.1, seconds=0.2, seed=2),
    "one 5x slower": Emulation(factors=(5.0,)),
    "4x2 stages, stall 0.1": Emulation(probability=0.1, seconds=0.1, seed=4),
}
PIPELINED = "4x2 stages, stall 0.1"


def blocks(language: str, split: str, limit: int) -> Any:
    """Text as rows of BLOCK bytes."""
    import numpy as np
    import torch

    text = bytearray()
    with open(DATA / language / f"{split}.jsonl") as lines:
        for line in lines:
            text += json.loads(line)["text"].encode() + b"\n"
            if len(text) >= limit * BLOCK:
                break
    rows = len(text) // BLOCK
    return torch.from_numpy(np.frombuffer(bytes(text[: rows * BLOCK]), dtype=np.uint8).astype(np.int64)).view(
        rows, BLOCK
    )


def build_model(tied: bool) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=BLOCK,
            tie_word_embeddings=tied,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
    )


def pretrain(steps: int, file: Path) -> float:
    """Train on German and French; returns the last loss."""
    import torch
    from safetensors.torch import save_file

    model, generator = build_model(tied=True), torch.Generator().manual_seed(0)
    text = torch.cat([blocks(language, "train", 20_000) for language in ("de", "fr")])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.zeros(())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * shape(step / steps)
        rows = text[torch.randint(len(text), (32,), generator=generator)]
        optimizer.zero_grad()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    save_file({name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}, file)
    return loss.item()


def load_start(model: Any, file: Path) -> None:
    from safetensors.torch import load_file

    weights = load_file(file)
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})


def shape(done: float) -> float:
    """Share of the peak learning rate when `done` (0 to 1) of the training is over: warm-up, then a cosine."""
    return done / 0.1 if done < 0.1 else (1 + math.cos(math.pi * min(1.0, (done - 0.1) / 0.9))) / 2


def train(rank: int, store: Any, job: dict[str, Any], data: Any, validation: Any, tag: str) -> dict[str, Any]:
    import torch

    from facility.sync.connect import connect_replicas
    from facility.sync.protocol import ReplicaRank
    from facility.sync.runtime.replica import Context
    from facility.sync.runtime.sampling import ReplicaOrder
    from tests.bench.quality_stages import sleep_until, train_stages

    emulation = dataclasses.replace(ROWS[job["row"]], seed=ROWS[job["row"]].seed + 100 * job["seed"])
    model = build_model(tied=job["row"] != PIPELINED)
    if job["start"]:
        load_start(model, Path(job["start"]))
    model.train()

    def rate(progress: float) -> float:
        return float(job["rate"] * (1.0 if job["constant"] else shape((progress + 0.5) / job["horizon"])))

    if job["row"] == PIPELINED:
        result = train_stages(
            rank,
            store,
            job,
            model,
            data,
            tag,
            pipelines=WORKERS,
            batch=BATCH,
            emulation=emulation,
            passes=(FORWARD, BACKWARD),
            rate=rate,
        )
        return result | {"loss": validated(model, validation) if rank == 0 else 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["rate"])
    settings = SyncSettings(policy=job["policy"], missing_seconds=60.0, **job["options"])
    order = ReplicaOrder(policy="strided", sequences=len(data), replica=rank, replicas=WORKERS, seed=job["seed"])
    context = Context(
        settings=settings,
        place=ReplicaRank(replica=rank, replicas=WORKERS),
        parameters=list(model.parameters()),
        steps=job["steps"],
        store=store,
        optimizer=optimizer,
    )
    sync = connect_replicas(context, namespace=tag)
    begin, step = time.monotonic(), 0
    since = begin  # the last exchange: the optimizer's step counts with the passes that follow
    while sync.wants_more() and (not job["seconds"] or time.monotonic() - begin < job["seconds"]):
        rows = data[order.take(step * BATCH, BATCH)]
        optimizer.zero_grad()
        loss = model(input_ids=rows, labels=rows).loss
        passes = emulation.duration(rank, FORWARD, 2 * step) + emulation.duration(rank, BACKWARD, 2 * step + 1)
        sleep_until(since + passes - OVERLAPPED)
        sync.before_step(BATCH)
        loss.backward()
        sleep_until(since + passes)
        sync.reduce_gradients(BATCH)
        since = time.monotonic()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate(sync.progress) * sync.step_scale
        optimizer.step()
        sync.after_step(BATCH)
        step += 1
    trained = time.monotonic() - begin
    sync.finish()
    report = sync.report()
    sync.close()
    loss = validated(model, validation) if rank == 0 else 0.0
    return {"loss": loss, "seconds": trained, "report": report}


def validated(model: Any, validation: Any) -> float:
    """Mean loss, nats per byte."""
    import torch

    model.eval()
    pieces = validation.split(64)
    with torch.no_grad():
        return float(sum(model(input_ids=piece, labels=piece).loss for piece in pieces) / len(pieces))


def worker(rank: int, world: int, port: int, language: str, jobs: list[dict[str, Any]], queue: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=600))
    data, validation = blocks(language, "train", 20_000), blocks(language, "validation", 512)
    validation = validation[: len(validation) // 64 * 64]
    for number, job in enumerate(jobs):
        job = dict(job)
        if job["equal"] == "time":
            whole, own = (float(store.get(f"seconds/{job['row']}/{name}")) for name in ("allreduce", job["policy"]))
            job["seconds"], job["horizon"], job["steps"] = whole, job["steps"] * whole / own, 1_000_000
        if rank >= WORKERS and job["row"] != PIPELINED:
            store.get(f"over/{number}")
            continue
        result = train(rank, store, job, data, validation, f"job{number}")
        if rank == 0:
            if job["equal"] != "time":
                store.set(f"seconds/{job['row']}/{job['policy']}", str(result["seconds"]))
            queue.put((number, result))
            store.set(f"over/{number}", "yes")
    queue.close()
    queue.join_thread()
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < world:
        time.sleep(0.01)
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=at_least(1), default=80, help="all-reduce's steps (default 80)")
    parser.add_argument("--rate", type=float, default=3e-3, help="AdamW's (peak) learning rate (default 0.003)")
    parser.add_argument("--constant", action="store_true", help="the learning rate neither warms up nor decays")
    parser.add_argument("--pretrain", type=int, default=1500, help="steps on German and French before (default 1500)")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--policies", nargs="*", default=["partial_reduce"], choices=POLICIES.names(), metavar="NAME")
    parser.add_argument("--no-time", action="store_true", help="leave out the runs of equal time")
    parser.add_argument("--bound", type=int, default=10, help="partial_reduce: P, rounds (default 10)")
    parser.add_argument(
        "--minimum", type=int, default=1, help="partial_reduce: members of a group at least (default 1)"
    )
    parser.add_argument(
        "--patience", type=float, default=SyncSettings.patience, help="partial_reduce (default %(default)s)"
    )
    parser.add_argument("--step", default="common", choices=["common", "own"], help="partial_reduce (default common)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the text and the stalls (default 0)")
    parser.add_argument("--language", default="it", help="folder of the text (default it)")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    a = parser.parse_args()
    if not DATA.is_dir():
        print(f"error: {DATA} is absent: it holds the text", file=sys.stderr)
        return 2
    options = {"partial_reduce": {"bound": a.bound, "minimum": a.minimum, "patience": a.patience, "step": a.step}}
    folder = tempfile.TemporaryDirectory()
    start = Path(folder.name) / "start.safetensors"
    began = pretrain(a.pretrain, start) if a.pretrain else 0.0
    jobs = []
    for row in a.rows:
        common = {
            "row": row,
            "steps": a.steps,
            "horizon": a.steps,
            "rate": a.rate,
            "constant": a.constant,
            "seed": a.seed,
            "seconds": 0.0,
            "start": str(start) if a.pretrain else "",
        }
        jobs.append(common | {"policy": "allreduce", "options": {}, "equal": ""})
        for policy in a.policies:
            for equal in ("updates",) if a.no_time else ("updates", "time"):
                jobs.append(common | {"policy": policy, "options": options.get(policy, {}), "equal": equal})
    port = free_port()
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # see CONTRIBUTING.md: torch's store asks for names
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["torch", "transformers.models.llama.modeling_llama", "facility.sync.policies.partial_reduce"]
    )
    queue = context.Queue()
    world = WORKERS * (2 if PIPELINED in a.rows else 1)
    processes = [context.Process(target=worker, args=(r, world, port, a.language, jobs, queue)) for r in range(world)]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=900) for _ in jobs)
    for process in processes:
        process.join()
    folder.cleanup()
    rows: dict[str, dict[str, Any]] = {}
    for number, job in enumerate(jobs):
        result = found[number]
        report = result["report"]
        entry = {
            "loss": round(result["loss"], 5),
            "seconds": round(result["seconds"], 2),
            "updates": sum(report["updates"].values()),
            "by_member": report["updates"],
            "mean_group": report["mean_group"],
        }
        row = rows.setdefault(job["row"], {})
        if job["policy"] == "allreduce":
            row["allreduce"] = entry
        else:
            entry["loss_over_allreduce"] = round(entry["loss"] / row["allreduce"]["loss"], 4)
            row[f"{job['policy']}, equal {job['equal']}"] = entry
    result = {
        "what": "validation loss (nats per byte) of the averaged model",
        "settings": {
            "workers": WORKERS,
            "block": BLOCK,
            "batch": BATCH,
            "steps": a.steps,
            "rate": a.rate,
            "constant": a.constant,
            "pretrained steps": a.pretrain,
            "loss there": round(began, 4),
            "language": a.language,
            "seed": a.seed,
            **options["partial_reduce"],
        },
        "machine": f"{os.cpu_count()} cores",
        "rows": rows,
    }
    print(json.dumps(result, indent=2))
    if a.out:
        a.out.write_text(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
