"""A plain FSDP2 training loop, as torchtitan writes it: what `tests/bench/gpu.py` compares the trainer with.

    python tests/bench/gpu_plain.py --folder DIR --steps N --batch N --micro N --dtype bfloat16 --device cuda

Every block and then the model is wrapped by `fully_shard` with a mixed-precision policy, float32 masters, fused AdamW,
gradient accumulation without synchronisation in between, clipping. Prints tokens a second from the end of the second
step on, and the peak memory of a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--folder", type=Path, required=True)
    for name in ("--steps", "--batch", "--micro"):
        p.add_argument(name, type=int, required=True)
    p.add_argument("--dtype", choices=["float32", "bfloat16"], required=True)
    p.add_argument("--device", choices=["cpu", "cuda"], required=True)
    p.add_argument("--compile", action="store_true")
    a = p.parse_args()
    from transformers import AutoModelForCausalLM

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        store = dist.HashStore()
        dist.init_process_group("nccl" if a.device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    else:
        dist.init_process_group("nccl" if a.device == "cuda" else "gloo")
    device = (
        torch.device(a.device, int(os.environ.get("LOCAL_RANK", "0"))) if a.device == "cuda" else torch.device("cpu")
    )
    if a.device == "cuda":
        torch.cuda.set_device(device)
    model = AutoModelForCausalLM.from_pretrained(a.folder / "model", dtype=torch.float32).to(device)
    model.config.use_cache = False
    model.train()
    mesh = torch.distributed.device_mesh.init_device_mesh(a.device, (world,))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, a.dtype), reduce_dtype=torch.float32)
    for block in model.model.layers:
        if a.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=a.device == "cuda")
    blocks = np.load(a.folder / "data" / "train.npy")
    rows = blocks[dist.get_rank() :: world]
    share = a.batch // world
    micro = a.micro or share
    ends = []
    for step in range(a.steps):
        for number in range(share // micro):
            start = (step * share + number * micro) % max(1, len(rows) - micro + 1)
            ids = torch.from_numpy(rows[start : start + micro].astype(np.int64)).to(device)
            model.set_requires_gradient_sync(number == share // micro - 1)
            logits = model(input_ids=ids).logits[:, :-1].float()
            loss = cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1)) * micro / share
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if a.device == "cuda":
            torch.cuda.synchronize()
        ends.append(time.perf_counter())
    if dist.get_rank() == 0:
        tokens = (a.steps - 2) * a.batch * blocks.shape[1]
        peak = torch.cuda.max_memory_allocated(device) if a.device == "cuda" else None
        print(json.dumps({"tokens_per_second": tokens / (ends[-1] - ends[1]), "peak_memory_bytes": peak}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
