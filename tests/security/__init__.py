"""Attacks by one facility, each run for real: it is told by name as absent or refused, and nobody else notices."""
