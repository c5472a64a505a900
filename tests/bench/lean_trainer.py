"""Stand-in for `facility.train` that costs next to nothing: the received weights come back, by hard links.

It imports nothing outside the standard library, so that a benchmark of what surrounds training measures that. The
weights' digests are those of the received manifest: a link holds the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m tests.bench.lean_trainer", description=(__doc__ or "").splitlines()[0])
    for name in ("model", "settings", "out"):
        p.add_argument(f"--{name}", type=Path, required=True, help="as of facility.train")
    p.add_argument("--round", type=int, required=True, help="as of facility.train; its other options are left out")
    given, _ = p.parse_known_args()
    model, out, number = given.model, given.out, given.round
    settings = json.loads(given.settings.read_text())
    told = json.loads((model / "manifest.json").read_text())
    made = out.with_name(f".{out.name}.{os.getpid()}")
    made.mkdir(parents=True)
    files = {}
    for name, entry in told["files"].items():
        if name.endswith(".safetensors"):
            os.link(os.path.realpath(model / name), made / name)
            files[name] = entry
    report = {
        "federation": settings["federation"],
        "facility": settings["facility"],
        "round": number,
        "samples": 1,
        "tokens": 1,
        "steps": 1,
        "loss_received": 2.0,
        "loss_returned": 1.0,
        "perplexity_received": 7.4,
        "perplexity_returned": 2.7,
        "training_loss": 1.5,
    }
    text = json.dumps(report).encode()
    (made / "report.json").write_bytes(text)
    files["report.json"] = {"sha256": hashlib.sha256(text).hexdigest(), "size": len(text)}
    lines = [f"{entry['sha256']}  {name}\n" for name, entry in sorted(told["files"].items()) if "safetensors" in name]
    manifest = {
        "format": 1,
        "kind": "update",
        "federation": settings["federation"],
        "facility": settings["facility"],
        "round": number,
        "base_sha256": hashlib.sha256("".join(lines).encode()).hexdigest(),
        "encoding": "full",
        "dtypes": told["dtypes"],
        "parameters": told["parameters"],
        "files": files,
        "extra": {},
    }
    (made / "manifest.json").write_text(json.dumps(manifest))
    made.rename(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
