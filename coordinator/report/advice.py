"""What to do about a reason: patterns of what jobs and checks say, and one sentence each."""

from __future__ import annotations

import re
from collections.abc import Sequence

ADVICE: Sequence[tuple[str, str]] = (
    (
        r"out of memory|OutOfMemory|oom.kill|Cannot allocate memory",
        "the job needs more memory than it has: lower `micro_batch_sequences`, shard over more ranks "
        "(`training.layout`), or ask for larger nodes in the template",
    ),
    (
        r"No space left|disk quota|Quota exceeded|is full",
        "a file system is full: free room at the facility, or move `workdir` to another file system",
    ),
    (
        r"dataset .* is not a directory|dataset.*not (found|there)|dataset\.json",
        "the dataset's path is wrong at that facility, or it is not prepared: `python -m facility.prepare` there, then "
        "correct `dataset` in federation.yml",
    ),
    (
        r"ModuleNotFoundError|ImportError|No module named|command not found",
        "the environment at the facility is incomplete: `crossfed setup FACILITY`, and look at `environment` in its "
        "deployment",
    ),
    (
        r"left no update|lost its node|CANCELLED|TIMEOUT|NODE_FAIL|time limit",
        "the job was ended from outside: `sacct -j JOB` (or the site's own command) says by whom; with a time limit, "
        "ask for more in `options`, or lower `training.steps`",
    ),
    (
        r"ran out of time",
        "nothing to do: its state is saved and the same round goes on from there, `come_backs` times at most",
    ),
    (
        r"manifest|sha256|truncated|incomplete|malformed",
        "what arrived is not what was sent: the next round sends the model in full; if it happens again, look at the "
        "facility's file system and quota",
    ),
    (
        r"signature|signed|allowed_signers",
        "the update is not signed by a key that `aggregation.allowed_signers` names for this facility: compare both",
    ),
    (
        r"belongs to run",
        "the update is of an earlier run of the same federation: nothing to do, the next round makes a new one",
    ),
    (
        r"claims|tokens than|weight",
        "its report counts more tokens than its settings allow: correct `claims.sequence_tokens`, or ask the facility",
    ),
    (
        r"CUDA|NCCL|driver|no kernel image|HIP",
        "the GPU's software refused: compare the driver with torch's CUDA at the facility (`crossfed check`), and try "
        "another node",
    ),
    (
        r"not finite|NaN|diverge",
        "the training diverged: lower `learning_rate`, look at the data of that facility, or use bfloat16 or float32",
    ),
    (
        r"Permission denied|refuses the login|expired",
        "the login is refused: `crossfed login FACILITY`; the run waits for it and nothing is lost",
    ),
    (r"no answer|does not answer|timed out|unreachable", "the facility does not answer: wait, or ask its staff"),
)
OTHERWISE = "read the log lines; the whole log is in the job's directory at the facility"


def advice_for(reason: str) -> str:
    """The first sentence whose pattern the reason matches."""
    return next((text for pattern, text in ADVICE if re.search(pattern, reason, re.IGNORECASE)), OTHERWISE)
