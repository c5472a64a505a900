"""Record-level differential privacy: units, their clipped gradients, noise, and the ledger of what was released."""
