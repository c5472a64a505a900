"""Planning: which device holds which layers of which replica. Data, search, stopping and reporting never mix; no torch."""
