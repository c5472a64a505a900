"""What bfloat16 has no number for."""

from __future__ import annotations

import numpy as np
import pytest

from facility.exchange.checkpoints.floats import narrow, widen
from tests.exchange.test_native import both, compiled


@compiled
def test_what_bfloat16_does_not_hold_as_a_number_is_never_one(monkeypatch: pytest.MonkeyPatch):
    """NaN of any payload, infinity and what is rounded to it: never finite, the same bits either way."""
    odd = [0x7F800001, 0x7F807FFF, 0x7FFF7FFF, 0x7FFF8000, 0x7FFFFFFF, 0x7F800000, 0x7F7F8000]
    last = np.array([0x7F7F7FFF, 0xFF7F7FFF], np.uint32).view(np.float32)

    def work():
        found = []
        for bits in (*odd, *(one | 0x80000000 for one in odd)):
            given, out = np.ones(40, np.float32), np.empty(40, np.uint16)
            given[17:18].view(np.uint32)[:] = bits
            finite, back = narrow(given, "BF16", out, np.empty(40, np.uint32)), np.empty(40, np.float32)
            widen(out, "BF16", back)
            assert not finite and np.isnan(back[17]) == np.isnan(given[17]) and not np.isfinite(back[17]), hex(bits)
            found.append(out)
        assert narrow(last, "BF16", np.empty(2, np.uint16), np.empty(2, np.uint32))
        return np.stack(found)

    assert np.array_equal(*both(monkeypatch, work))
