"""Exact assignment of contiguous layers to devices."""
