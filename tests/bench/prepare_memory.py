"""Peak memory of `facility.prepare` on corpora of several sizes, and what is left after SIGKILL in the middle.

    python tests/bench/prepare_memory.py [--megabytes 250 1000] [--document 1000] [--processes 1]
                                         [--near-duplicates 0.8] [--no-kill]

Draws JSON lines of random words, prepares each size in a process of its own with a tokenizer of words, and reads that
process's largest resident memory. Then the largest is prepared once more, killed by SIGKILL after a third of the time
that it took, and started again: its files must be those of the undisturbed run. Prints JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORDS = [f"w{number}" for number in range(20_000)]


def write_corpus(path: Path, size: int, document: int, seed: int = 0) -> int:
    """JSON lines of about `size` bytes in documents of about `document`; their number."""
    draw, written, documents = random.Random(seed), 0, 0
    with open(path, "w") as file:
        while written < size:
            count = draw.randint(document // 12, document // 4)
            line = json.dumps({"text": f"{documents} " + " ".join(draw.choices(WORDS, k=count))}) + "\n"
            file.write(line)
            written += len(line)
            documents += 1
    return documents


def write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[UNK]", "[EOS]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]").save_pretrained(directory)


def command(place: Path, corpus: Path, out: Path, a: argparse.Namespace) -> list[str]:
    words = [sys.executable, "-m", "facility.prepare", "--input", str(corpus), "--tokenizer", str(place / "tokenizer")]
    return [
        *words,
        "--out",
        str(out),
        "--block-tokens",
        "512",
        "--processes",
        str(a.processes),
        "--allow-overlap",
        *(["--near-duplicates", str(a.near_duplicates)] if a.near_duplicates else []),
    ]


def started(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=2)


def measured(words: list[str]) -> dict[str, float]:
    """Seconds, CPU seconds and peak resident memory of one run (of its own process, not of tokenising ones)."""
    begun = time.perf_counter()
    process = started(words)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise RuntimeError(f"{words[2]} ended with status {status}")
    return {
        "seconds": round(time.perf_counter() - begun, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_megabytes": round(used.ru_maxrss * 1024 / 1e6),
    }


def digests(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.file_digest(p.open("rb"), "sha256").hexdigest() for p in sorted(directory.glob("*.npy"))}


def killed(words: list[str], after: float, out: Path) -> dict[str, Any]:
    """Kill a run, start it again, and say what the second one had left to do."""
    process = started(words)
    time.sleep(after)
    process.send_signal(signal.SIGKILL)
    process.wait()
    part = out.with_name(f".{out.name}.part") / "state.json"
    batches = json.loads(part.read_text())["batches"] if part.is_file() else 0
    return {"killed_after_seconds": round(after, 1), "batches_kept": batches, "second_run": measured(words)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[250, 1000], help="sizes of the corpora")
    parser.add_argument("--document", type=int, default=1000, help="bytes of a document, about")
    parser.add_argument("--processes", type=int, default=1, help="tokenising processes")
    parser.add_argument("--near-duplicates", type=float, default=0.0, help="similarity from which on; 0: off")
    parser.add_argument("--no-kill", action="store_true", help="leave the killed run out")
    a = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="prepare-memory-"))
    try:
        write_tokenizer(place / "tokenizer")
        runs: list[dict[str, Any]] = []
        for size in a.megabytes:
            corpus, out = place / f"{size}.jsonl", place / f"out-{size}"
            documents = write_corpus(corpus, size * 1_000_000, a.document)
            runs.append({"megabytes": size, "documents": documents} | measured(command(place, corpus, out, a)))
        resumed: dict[str, Any] | None = None
        if not a.no_kill:
            again = place / "again"
            resumed = killed(command(place, corpus, again, a), runs[-1]["seconds"] / 3, again)
            resumed["same_files"] = digests(again) == digests(out)
        print(json.dumps({"settings": vars(a), "runs": runs, "killed": resumed}, indent=2))
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
