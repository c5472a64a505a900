"""Largest numbers that are believed in a message, apart from it: who asks for them alone needs no pydantic."""

from __future__ import annotations

MOST_COUNT = 10**15
"""Of samples, tokens and steps in one round."""
MOST_LOSS = 1e4
"""Nats per token; a guess at random among 10^9 tokens has 21."""
