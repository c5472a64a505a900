"""Which tokenizer made these ids: a digest that equal tokenizers share wherever their files lie.

It covers the meaning of every id: the model's vocabulary, its merges or scores in order, the added tokens. It omits
normalizer, pre_tokenizer, post_processor, decoder and flags of added tokens, because transformers 5 rewrites them by
the name of the class when a tokenizer is loaded and saved again (seen with Llama's, Qwen2's, BERT's and T5's).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from facility.exchange.errors import InputError
from facility.exchange.files.bounded import read_bounded
from facility.exchange.json_text import parse_values
from facility.exchange.messages.manifest import sha256_of

WHOLE = "tokenizer.json"
OLDER = (("tekken.json",), ("vocab.json", "merges.txt"), ("vocab.json",), ("vocab.txt",))
"""Files that define a tokenizer without a tokenizer.json: the first complete set; else `*.model`, `*.tiktoken`."""
MOST_BYTES = 256 << 20
"""Of a tokenizer.json; one of a million tokens has 60 MB."""
TOO_MUCH = (-signal.SIGABRT, -signal.SIGXCPU, -signal.SIGKILL, -signal.SIGSEGV)
"""How a process ends that reaches a limit."""
VOCABULARIES = (".model", ".spm", ".tiktoken")
"""Ends of the names of a tokenizer's vocabularies, whatever they begin with (`spiece.model`)."""


LOAD_SECONDS, LOAD_BYTES = 60, 4 << 30
"""Of computing and of memory in which a tokenizer.json is to be loaded; one of a million tokens takes 5 s and 1 GiB."""
LOAD = """import resource, sys
seconds, size = map(int, sys.argv[2:])
for kind, most in (resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, size):
    resource.setrlimit(kind, (most, most))
import tokenizers
tokenizers.Tokenizer.from_file(sys.argv[1])
"""


def check_loads(file: Path) -> None:
    """Raise `InputError` for a tokenizer.json that is too large, or takes too much to be loaded.

    It is tried in a process of its own: as it is loaded its normalizer runs on its added tokens, and a library in Rust
    that lacks memory aborts. Whatever else is wrong with it is left to those that load it.
    """
    if file.stat().st_size > MOST_BYTES:
        raise InputError(
            f"{file} has {file.stat().st_size} bytes, expected at most {MOST_BYTES}: it is not a tokenizer"
        )
    command = [sys.executable, "-P", "-c", LOAD, str(file), str(LOAD_SECONDS), str(LOAD_BYTES)]
    alone = os.environ | {"RAYON_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}  # threads reserve addresses by the core
    if subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=alone).returncode in TOO_MUCH:
        raise InputError(
            f"{file} cannot be loaded in {LOAD_SECONDS} s and {LOAD_BYTES >> 30} GiB: it is damaged, or meant to do "
            "harm; copy it again from where the model came from"
        )


def tokenizer_digest(directory: Path) -> str | None:
    """`FILES:SHA256` of the tokenizer in a directory, FILES being what it was read from; None where there is none.

    Raises `InputError` for a tokenizer.json that is damaged.
    """
    if (directory / WHOLE).is_file():
        return f"{WHOLE}:{hashlib.sha256(_meaning(directory / WHOLE)).hexdigest()}"
    single = sorted(p.name for p in directory.glob("*") if p.suffix in VOCABULARIES)
    for names in (*OLDER, tuple(single)):
        if names and all((directory / name).is_file() for name in names):
            lines = "".join(f"{sha256_of(directory / name)}  {name}\n" for name in names)
            return f"{'+'.join(names)}:{hashlib.sha256(lines.encode()).hexdigest()}"
    return None


def tokenizers_differ(one: str | None, other: str | None) -> bool:
    """True if the digests are of different tokenizers; False if unknown (not read from files of the same names)."""
    kinds = [digest.partition(":")[0] if digest and ":" in digest else None for digest in (one, other)]
    return kinds[0] is not None and kinds[0] == kinds[1] and one != other


def _meaning(path: Path) -> bytes:
    try:
        raw: dict[str, Any] = parse_values(read_bounded(path, MOST_BYTES).decode())
        model = raw["model"]
        ids = {**_vocabulary(model["vocab"]), **{t["content"]: t["id"] for t in raw.get("added_tokens") or []}}
        merges = [m.split(" ") if isinstance(m, str) else m for m in model.get("merges") or []]
        scores = [entry[1] for entry in model["vocab"]] if isinstance(model["vocab"], list) else []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(
            f"{path} is not a tokenizer: {error!r}; copy it again from where the model came from"
        ) from None
    return json.dumps([sorted(ids.items()), merges, scores], ensure_ascii=True).encode()


def _vocabulary(vocabulary: Any) -> dict[str, int]:
    """Id of every token; Unigram models list [token, score] in the order of their ids."""
    if isinstance(vocabulary, dict):
        return vocabulary
    return {token: i for i, (token, _) in enumerate(vocabulary)}
