"""How tensors are cut for sums whose last bits depend on the order of additions: the same cuts on both sides."""

from __future__ import annotations

PIECE = 1 << 16
"""Elements worked on at once: small enough to stay in a core's cache. Sums of statistics are per piece."""
SPAN = 64 * PIECE
"""Elements of one unit of work. Both are constants, so that results depend on neither threads nor read size."""
