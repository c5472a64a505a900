"""What to do about a reason: patterns of what jobs and checks say, and one sentence each."""

from __future__ import annotations

import re
from collections.abc import Sequence

SCRIPT = (
    "the job's script failed before the round could say why: read the end of its output at the facility, first for the "
    "template's own lines (modules, `env.sh`), which `crossfed setup FACILITY` tries; 137 and -9: it was killed, most "
    "often for its memory"
)
ENDINGS: Sequence[tuple[str, str]] = (
    (
        r"taken for lost.* still waits ",
        "the queue let the job wait for longer than `rounds.longest_queue_hours` allows: see why with `crossfed status "
        "--queues`, and raise it where queues are that long; the next round submits a new job",
    ),
    (
        r"taken for lost",
        "the queue reports a job as running long after its time limit: give the site's staff the job's number, and "
        "see with the scheduler's own command whether it is gone; the next round submits a new one",
    ),
    (
        r"was not taken",
        "the scheduler refused the job: correct what it names in `fill`, `options` or the template; `crossfed check` "
        "tries it without a round",
    ),
    (
        r"OUT.OF.MEMORY|oom",
        "the scheduler ended the job for its memory: ask for more in `options` or the template, lower "
        "`micro_batch_sequences`, or shard over more ranks (`training.layout`)",
    ),
    (
        r"TIMEOUT|DEADLINE|time.?limit|walltime|\bh_rt\b",
        "the job ran into its time limit: ask for more in `options`, lower `training.steps`, or set "
        "`training.limits.seconds` below it, so that the job saves its state in time and the round goes on from there",
    ),
    (
        r"NODE_FAIL|BOOT_FAIL|node.?fail",
        "a node failed, which is not the job's fault: nothing to do, the next round submits a new job; if it happens "
        "again, give the site's staff the job's number",
    ),
    (
        r"PREEMPTED",
        "another job took its nodes: choose a queue or QoS that is not preempted, or accept rounds without it",
    ),
    (
        r"CANCEL",
        "somebody cancelled the job, the site's staff or this account: if it was not "
        "you, ask the site with the job's number; the next round submits a new one",
    ),
    (r"exit code -?[1-9]", SCRIPT),
)
"""Of a scheduler's account of a job's end."""
ADVICE: Sequence[tuple[str, str]] = (
    (
        r"out of memory|OutOfMemory|oom.kill|Cannot allocate memory|will need about .* of memory",
        "the job needs more memory than it has: lower `micro_batch_sequences`, shard over more ranks "
        "(`training.layout`), or ask for larger nodes in the template",
    ),
    (
        r"No space left|disk quota|Quota exceeded|is full|over its quota|grow so large|read-only",
        "a file system takes no more: free room at the facility (or have its quota, its `ulimit -f` or its mounting "
        "changed), or move `workdir` to another",
    ),
    (
        r"prepare (the dataset|it) again|holds ids outside",
        "the dataset at the facility is not as it was prepared, or of another version: restore its files from a copy, "
        "or prepare it again; the next round takes it",
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
    (r"left no update: .*(exit code|ended with code) -?[1-9]", SCRIPT),
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
        r"signature|\bsigned\b|allowed_signers",
        "the update is not signed by a key that `aggregation.allowed_signers` names for this facility: compare both",
    ),
    (
        r"overflowed float16",
        "gradients overflow float16: `compute_dtype: bfloat16` or float32 there, or more `steps` a round, in which the "
        "loss scale falls far enough",
    ),
    (
        r"not finite|was finite|\bnan\b|diverge",
        "the training diverged: lower `learning_rate`, look at the data of that facility, or use bfloat16 or float32",
    ),
    (
        r"manifest|sha256|truncated|incomplete|malformed",
        "what arrived is not what was sent: the next round sends the model in full; if it happens again, look at the "
        "facility's file system and quota",
    ),
    (
        r"belongs to run",
        "the update is of an earlier run of the same federation: nothing to do, the next round makes a new one",
    ),
    (
        r"it claims|settings allow",
        "its report counts more tokens than its settings allow: correct `claims.sequence_tokens`, or ask the facility",
    ),
    (
        r"CUDA|NCCL|driver|no kernel image|\bHIP",
        "the GPU's software refused: compare the driver with torch's CUDA at the facility (`crossfed check`), and try "
        "another node",
    ),
    (
        r"Permission denied|refuses the login|expired",
        "the login is refused: `crossfed login FACILITY`; the run waits for it and nothing is lost",
    ),
    (
        r"round closed|of an earlier round still runs",
        "the round did not wait for it (`rounds` in federation.yml): nothing to do, or give rounds more time if this "
        "facility should be in each",
    ),
    (r"no answer|does not answer|timed out|unreachable", "the facility does not answer: wait, or ask its staff"),
)
OTHERWISE = (
    "what the reason says; where it says nothing, read the log lines; the whole log is in the job's directory at the "
    "facility"
)


def advice_for(reason: str, ending: str = "") -> str:
    """The first sentence whose pattern matches; the scheduler's account of the job's `ending` counts first."""
    return _first(ENDINGS, ending) or _first(ADVICE, reason) or OTHERWISE


def _first(known: Sequence[tuple[str, str]], text: str) -> str:
    return next((advice for pattern, advice in known if re.search(pattern, text, re.IGNORECASE)), "")
