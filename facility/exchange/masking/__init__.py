"""Secure aggregation, as both sides must agree on it: fixed point, mask streams, secret sharing, its messages."""
