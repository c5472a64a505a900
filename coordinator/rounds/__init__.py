"""What several steps of a round share: the signed order, the largest weight of an update, notes on late facilities."""
