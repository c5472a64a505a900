"""Speed, size and error of the smaller messages, on one core.

    python tests/bench/delta.py --work DIR [--megabytes 256]

One bfloat16 model of normally distributed weights (rms 0.02) and a float32 update that moved by rms 1e-4. Prints JSON:
for each encoding the bytes over those of the full bfloat16 checkpoint, the error over the update's rms, and megabytes
of bfloat16 checkpoint a second for encoding (with a residual kept) and decoding: of the codec, from arrays to arrays,
and of whole commands over files with their headers, manifests and hashes, warm cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from facility.exchange.checkpoints import delta  # noqa: E402
from facility.exchange.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from facility.exchange.checkpoints.codecs import PART  # noqa: E402
from facility.exchange.checkpoints.delta_parts import read_parts, write_difference  # noqa: E402
from facility.exchange.checkpoints.floats import narrow, widen  # noqa: E402
from facility.exchange.checkpoints.magnitudes import histogram, threshold_for  # noqa: E402
from facility.exchange.checkpoints.writer import Planned, TensorWriter  # noqa: E402
from facility.exchange.delta_codecs import CODECS, load_codec  # noqa: E402
from facility.exchange.messages.manifest import Manifest, read_manifest, write_manifest  # noqa: E402
from facility.exchange.messages.settings import SPARSE_DENSITY  # noqa: E402


def codec_alone(encoding: str, base: Path, update: Path, megabytes: float) -> dict[str, int]:
    """MB of bfloat16 a second: stored base and update to message and residual, and base and message to values."""
    codec, old, new = load_codec(encoding), open_checkpoint(base).tensors, open_checkpoint(update).tensors
    seconds = dict.fromkeys(("encode", "decode"), 0.0)
    values, missed, scratch = (np.empty(PART, np.float32) for _ in range(3))
    for name in old:
        limit = None
        for _, stored in read_parts([old[name], new[name]]):
            started = time.perf_counter()
            write_difference(stored[0], old[name].dtype, stored[1], new[name].dtype, values, scratch)
            if encoding == "sparse" and limit is None:  # the command takes it from a share of each part, once a tensor
                limit = threshold_for(histogram(values), SPARSE_DENSITY)
            message = codec.encode(values, limit or 0.0)
            np.subtract(values, codec.decode(message, PART), out=missed)
            middle = time.perf_counter()
            widen(stored[0], old[name].dtype, values)
            np.add(values, codec.decode(message, PART), out=values)
            seconds["encode"] += middle - started
            seconds["decode"] += time.perf_counter() - middle
    return {f"codec_{way}_mb_per_second": round(megabytes / taken) for way, taken in seconds.items()}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, required=True, help="scratch directory, made and removed")
    p.add_argument("--megabytes", type=int, default=256, help="size of the bfloat16 checkpoint (default 256)")
    a = p.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = a.megabytes // 8
    shape, size = (1 << 11, 1 << 11), 1 << 22
    a.work.mkdir(parents=True)
    base, update = a.work / "base", a.work / "update"
    for directory, dtype in ((base, "BF16"), (update, "F32")):
        directory.mkdir()
        planned = [Planned(name=f"w{i:04d}", dtype=dtype, shape=shape) for i in range(rows)]
        with TensorWriter(directory, {"model.safetensors": planned}) as writer:
            for number, tensor in enumerate(planned):
                values = np.random.default_rng(number).standard_normal(size, np.float32) * np.float32(0.02)
                bits = np.empty(size, np.uint16)
                narrow(values, "BF16", bits, np.empty(size, np.uint32))
                if dtype == "F32":
                    values = (bits.astype(np.uint32) << 16).view(np.float32)
                    values += np.random.default_rng(10**6 + number).standard_normal(size, np.float32) * np.float32(1e-4)
                    writer.write(tensor.name, 0, values.data.cast("B"))
                else:
                    writer.write(tensor.name, 0, bits.data.cast("B"))
    write_manifest(base, Manifest(kind="model", federation="bench", round=0))
    sent = read_manifest(base)
    write_manifest(
        update, Manifest(kind="update", federation="bench", round=0, facility="a", base_sha256=sent.content_sha256)
    )
    full = rows * size * 2
    result: dict[str, object] = {"model_megabytes": full / 1e6}
    for encoding in [name for name in CODECS.names() if not CODECS.get(name).lossless]:  # those are of models alone
        message, residual, decoded = a.work / "message", a.work / "residual", a.work / "decoded"
        started = time.perf_counter(), time.process_time()
        done = delta.encode_update(full=update, reference=base, out=message, encoding=encoding, residual_out=residual)
        middle = time.perf_counter(), time.process_time()
        delta.decode_update(message, reference=base, out=decoded)
        ended = time.perf_counter(), time.process_time()
        result[encoding] = {
            "bytes_over_bfloat16": round(done.message_bytes / full, 4),
            "error_over_update_rms": round(done.relative_error, 4),
            **codec_alone(encoding, base, update, full / 1e6),
            "encode_mb_per_second": round(full / 1e6 / (middle[0] - started[0])),
            "encode_mb_per_cpu_second": round(full / 1e6 / (middle[1] - started[1])),
            "decode_mb_per_second": round(full / 1e6 / (ended[0] - middle[0])),
            "decode_mb_per_cpu_second": round(full / 1e6 / (ended[1] - middle[1])),
        }
        for directory in (message, residual, decoded):
            shutil.rmtree(directory)
    print(json.dumps(result, indent=2))
    shutil.rmtree(a.work)


if __name__ == "__main__":
    main()
