"""What a coordinator and the gate of a facility both write: the word that begins a request, and the sign of arrival."""

from __future__ import annotations

GATE = "crossfed-gate"
"""First word of a request, and the name of the program that answers it."""
ARRIVED = "crossfed-arrived"
"""Printed once a piece of a file is written, to distinguish a connection that delivered from one that broke."""
