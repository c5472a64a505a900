"""Planning: assigns layers and replicas to devices. Data, search, stopping and reporting are separate; no torch."""
