"""Secure aggregation's cost as JSON: seconds a GB to mask, bytes sent, GB a second to unmask in the aggregation's pass.

    python -m tests.bench.masking [--megabytes 256] [--facilities 4] [--bits 16] [--repeats 5]

Figures are per core (one thread), in CPU seconds with the system's own: the best of the repeats, which the load of
the machine disturbs least, and the worst; `user` and `system` each by itself. On a virtual machine a page of a file
that is new to the machine may cost the system more than all arithmetic: `io_...` is what the same bytes cost that are
read, written and synced with nothing done to them, turn about with the masking, and `mask_user_and_least_io_...` the
best of either, which is what masking costs where memory is not new. `mask_stream_...` is one peer's share alone: its
stream, and adding that. `mask_from_memory_...`: of an update that the trainer holds, which it does not write before.
`unmask` is the whole pass: reading every update and writing the next model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from coordinator.aggregation.request import Request
from coordinator.aggregation.run import aggregate
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.unmasking import Unmasking
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.codecs import PART
from facility.exchange.files.durable import new_directory
from facility.exchange.masking.fixed_point import fixed_point
from facility.masking.mask_update import mask_tensors
from facility.masking.masked_piece import Masker, Stored
from facility.masking.private_keys import PrivateKeys
from facility.training.shards import shard_of
from facility.training.state.message import held_for_masks
from facility.training.state.save import plan_files
from tests.masking import federation as federations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="of the model in bfloat16 (default 256)")
    parser.add_argument("--facilities", type=int, default=4)
    parser.add_argument("--bits", type=int, choices=(16, 32), default=16)
    parser.add_argument("--repeats", type=int, default=5, help="maskings of the first facility's update (default 5)")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="crossfed-bench-") as folder:
        print(json.dumps(measure(Path(folder), arguments), indent=2))


def measure(root: Path, arguments: argparse.Namespace) -> dict[str, object]:
    megabytes, count, bits = arguments.megabytes, arguments.facilities, arguments.bits
    names = tuple(f"f{number:02d}" for number in range(count))
    rows = megabytes * 1_000_000 // 2 // 4096 // 4
    federations.SHAPES.clear()
    federations.SHAPES.update({f"layer{i}.weight": (rows, 4096) for i in range(4)})
    signers = federations.ssh_keys(root / "keys", names)
    federation = federations.Masking(
        root=root / "federation", signers=signers, names=names, bits=bits, largest_step=0.064, dtype=torch.bfloat16
    )
    roster = federation.roster([federation.keys(name) for name in names])
    told = federations.steps(names)
    masked, seconds, io, held = {}, [], [], []
    for name in names:
        plain = federation.plain(name, told[name])
        for _ in range(arguments.repeats if name == names[0] else 1):
            begun = os.times()
            masked[name] = federation.masked(name, roster, plain)
            seconds.append(spent_since(begun))
            kept = [masked[name], masked[name].with_name("residual")]
            io.append(io_seconds([plain, federation.model()], kept, root / "io"))
            if name == names[0]:
                held.append(memory_seconds(federation, name, roster, plain, root / "held"))
    gigabytes = open_checkpoint(masked[names[0]]).bytes / 1e9
    per_peer = 1 / gigabytes / (count - 1)
    request = federation.settle(roster, masked)
    begun = time.perf_counter()
    answer = federation.answer(names[0], request)
    answered = time.perf_counter() - begun
    seeds = [(-1, bytes([number + 1] * 32)) for number in range(count)]
    opened = federation.read(roster)
    unmasking = Unmasking(
        bits=bits,
        weights=opened.weights("tokens", 0.5),
        survivors=sorted(names),
        seeds=seeds,
        clips={},
        default_clip=1.0,
    )
    spent = aggregation_seconds(federation, masked, unmasking, root / "model")
    user, system = zip(*seconds, strict=True)
    return {
        "model_gigabytes_bfloat16": megabytes / 1000,
        "facilities": count,
        "bits": bits,
        "sent_over_bfloat16": gigabytes / (megabytes / 1000),
        "shares_bytes": (masked[names[0]] / "shares.json").stat().st_size,
        "mask_cpu_seconds_per_gigabyte_sent": min(map(sum, seconds)) / gigabytes,
        "mask_cpu_seconds_per_gigabyte_sent_worst": max(map(sum, seconds)) / gigabytes,
        "mask_cpu_seconds_per_gigabyte_and_peer": min(map(sum, seconds)) * per_peer,
        "mask_user_seconds_per_gigabyte_and_peer": min(user) * per_peer,
        "mask_user_seconds_per_gigabyte_and_peer_worst": max(user) * per_peer,
        "mask_system_seconds_per_gigabyte_and_peer": min(system) * per_peer,
        "mask_system_seconds_per_gigabyte_and_peer_worst": max(system) * per_peer,
        "io_cpu_seconds_per_gigabyte_and_peer": min(map(sum, io)) * per_peer,
        "io_cpu_seconds_per_gigabyte_and_peer_worst": max(map(sum, io)) * per_peer,
        "mask_user_and_least_io_seconds_per_gigabyte_and_peer": (min(user) + min(map(sum, io))) * per_peer,
        "mask_from_memory_cpu_seconds_per_gigabyte_and_peer": min(map(sum, held)) * per_peer,
        "mask_from_memory_user_seconds_per_gigabyte_and_peer": min(user for user, _ in held) * per_peer,
        "mask_stream_cpu_seconds_per_gigabyte_and_peer": stream_seconds(bits),
        "unmask_gigabytes_read_per_cpu_second": count * gigabytes / sum(spent),
        "unmask_gigabytes_read_per_user_second": count * gigabytes / spent[0],
        "answer_seconds": answered,
        "answer_bytes": sum(path.stat().st_size for path in answer.iterdir()),
    }


def spent_since(begun: os.times_result) -> tuple[float, float]:
    """CPU seconds of this process since then: its own, and the system's for it."""
    now = os.times()
    return now.user - begun.user, now.system - begun.system


def io_seconds(read: list[Path], written: list[Path], scratch: Path) -> tuple[float, float]:
    """Of reading all tensors of `read`, and writing and syncing as much as `written` holds, by one buffer of a MiB."""
    buffer = memoryview(bytearray(1 << 20))
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    begun = os.times()
    for path in tensors(read):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    for number, path in enumerate(tensors(written)):
        left = path.stat().st_size
        with (scratch / str(number)).open("wb", buffering=0) as file:
            while left:
                left -= file.write(buffer[: min(left, len(buffer))])
            os.fsync(file.fileno())
    return spent_since(begun)


def memory_seconds(
    federation: federations.Masking, name: str, roster: Path, plain: Path, out: Path
) -> tuple[float, float]:
    """Of masking the tensors of `plain` as the trainer does, from memory, into files that are synced."""
    stored = open_checkpoint(plain)
    slots, _ = plan_files([(key, one.dtype, one.shape) for key, one in stored.tensors.items()])
    parts = [shard_of(key, torch.nn.Parameter(stored.read(key), requires_grad=False)) for key in stored.tensors]
    update = held_for_masks(plain, slots, parts)
    assert update is not None
    member = PrivateKeys(state=federation.state(name)).of(federation.read(roster), name)
    shutil.rmtree(out, ignore_errors=True)
    base = open_checkpoint(federation.model())
    begun = os.times()
    with new_directory(out / "sent") as sent, new_directory(out / "rest") as rest:
        mask_tensors(update, base, sent, rest, member=member, settings=federation.masking)
    return spent_since(begun)


def tensors(folders: list[Path]) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.rglob("*.safetensors"))]


def stream_seconds(bits: int, repeats: int = 5) -> float:
    """CPU seconds a GB of one stream: the least difference between masking with nine streams and with one."""
    pieces = 100
    values = Stored(values=np.zeros(PART, np.float32), dtype="F32")
    point = fixed_point(bits, 1.0, {"a": 0.5, "b": 0.5})

    def spent(rows: int) -> float:
        masks = [(1, bytes([row] * 32)) for row in range(rows)]
        masker = Masker(masks, piece=PART, bits=bits, weight=0.5, factor=1.0)
        begun = time.process_time()
        for piece in range(pieces):
            masker.mask(values, None, point, piece * PART)
        return time.process_time() - begun

    gigabytes = pieces * PART * bits / 8 / 1e9
    return (min(spent(9) for _ in range(repeats)) - min(spent(1) for _ in range(repeats))) / 8 / gigabytes


def aggregation_seconds(
    federation: federations.Masking, updates: dict[str, Path], unmasking: Unmasking, out: Path
) -> tuple[float, float]:
    begun = os.times()
    aggregate(
        Request(
            base=federation.model(),
            updates=updates,
            out=out,
            settings=AggregationSettings(rule="mean"),
            threads=1,
            unmasking=unmasking,
        )
    )
    return spent_since(begun)


if __name__ == "__main__":
    main()
