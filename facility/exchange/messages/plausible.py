"""Largest numbers that are believed in a message, in a module of their own: importing them alone needs no pydantic."""

from __future__ import annotations

MOST_ROUNDS = 10**9
"""Number of a round, and of rounds."""
MOST_COUNT = 10**15
"""Of samples, tokens and steps in one round."""
MOST_LOSS = 1e4
"""Nats per token; a guess at random among 10^9 tokens has 21."""
MOST_NODES = 1_000_000
"""Most nodes that a job may claim."""
MOST_JOULES = 1e15
"""Of one job; Slurm writes 2^64 - 2 for what it does not know."""
