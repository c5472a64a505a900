"""Peak memory of a rank against the size of the model, loading and saving: 1, 2 and 4 ranks.

    python tests/bench/train_memory.py [--hidden 1024] [--layers 8] [--ranks 1,2,4]

Each rank is a fresh process that loads its shard of a bfloat16 checkpoint as float32 masters and saves it again in
bfloat16, without training. Prints JSON: bytes above what the imported libraries take, beside the rank's own shard.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.bench.asked import names_of


def resident() -> int:
    """Resident bytes that are no file's (`RssAnon`): a mapped file may be dropped at any time."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


class Watch:
    """Highest `RssAnon` seen by a thread that looks every 5 ms."""

    def __init__(self) -> None:
        import threading

        self.peak, self._on = resident(), True
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while self._on:
            self.peak = max(self.peak, resident())
            time.sleep(0.005)

    def stop(self) -> int:
        self._on = False
        self._thread.join()
        return self.peak


def measure(rank: int, world: int, model: str, out: str) -> dict[str, Any]:
    import torch

    from facility.exchange.checkpoints.checkpoint import open_checkpoint
    from facility.exchange.messages.settings import TrainingSettings
    from facility.training.data.tasks import CausalLM
    from facility.training.model import choose_attention, read_config
    from facility.training.monitor.clock import Clock
    from facility.training.parallel.arrange import layout_of_settings
    from facility.training.parallel.assemble import assemble_part, build_meta_model
    from facility.training.parallel.sharder import Sharder
    from facility.training.processes.ranks import barrier, from_environment
    from facility.training.shards import load_shards
    from facility.training.state.save import create_files, plan_files, write_shards

    settings, ranks, task = TrainingSettings(device="cpu"), from_environment("cpu"), CausalLM()
    config, checkpoint = read_config(Path(model)), open_checkpoint(Path(model))
    attention = choose_attention(config, task.factory, ranks.device, torch.float32)
    layout = layout_of_settings(ranks, settings, blocks=config.num_hidden_layers, block_tokens=16)
    import torch.distributed.fsdp
    import torch.distributed.tensor

    barrier(ranks)
    before = resident()
    watch, began = Watch(), time.perf_counter()
    skeleton = build_meta_model(config, task, attention, settings)
    held = assemble_part(skeleton, task, checkpoint, Sharder(layout, ranks, settings, Clock(ranks.device)))
    load_shards(held.parts, checkpoint)
    load_peak, loaded = watch.stop(), time.perf_counter()
    barrier(ranks)
    settled = resident()
    watch, began_save = Watch(), time.perf_counter()
    slots, headers = plan_files([(n, "BF16", e.shape) for n, e in checkpoint.tensors.items()])
    if ranks.first:
        Path(out).mkdir()
        create_files(Path(out), slots, headers)
    barrier(ranks)
    write_shards(Path(out), slots, held.parts)
    save_peak, saved = watch.stop(), time.perf_counter()
    barrier(ranks)
    return {
        "rank": rank,
        "shard_bytes": sum(p.tensor.numel() * 4 for p in held.parts),
        "load_peak_bytes": load_peak - before,
        "save_peak_bytes": save_peak - settled,
        "load_seconds": round(loaded - began, 3),
        "save_seconds": round(saved - began_save, 3),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    from tests.distributed import run_distributed

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024, help="width of the Llama (units)")
    parser.add_argument("--layers", type=int, default=8, help="blocks of the Llama")
    parser.add_argument("--vocabulary", type=int, default=32_000, help="tokens")
    parser.add_argument(
        "--ranks", type=names_of(map(str, range(1, 17))), default="1,2,4", help="numbers of processes, by commas"
    )
    arguments = parser.parse_args()
    os.environ.update(PYTHONPATH=str(Path(__file__).resolve().parents[2]), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    folder = Path(tempfile.mkdtemp(prefix="train-memory-"))
    try:
        import torch
        from transformers import AutoModelForCausalLM, LlamaConfig

        model = AutoModelForCausalLM.from_config(
            LlamaConfig(
                hidden_size=arguments.hidden,
                intermediate_size=4 * arguments.hidden,
                num_hidden_layers=arguments.layers,
                num_attention_heads=16,
                vocab_size=arguments.vocabulary,
            ),
            dtype=torch.bfloat16,
        )
        model.save_pretrained(folder / "model", max_shard_size="200MB")
        parameters = sum(p.numel() for p in model.parameters())
        del model
        results = {}
        for world in map(int, arguments.ranks):
            results[str(world)] = run_distributed(
                measure, world, str(folder / "model"), str(folder / f"out-{world}"), timeout=900
            )
        print(
            json.dumps(
                {
                    "parameters": parameters,
                    "model_bytes_float32": 4 * parameters,
                    "model_bytes_bfloat16": 2 * parameters,
                    "by_ranks": results,
                    "cores": os.cpu_count(),
                },
                indent=2,
            )
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
