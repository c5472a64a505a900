"""Secure aggregation at a facility: its keys, the masking of its updates, and its answers when masks come off."""
