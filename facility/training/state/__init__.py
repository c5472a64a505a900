"""What is read and written: checkpoints into shards, optimizer state, mid-round checkpoints, updates."""
