"""The layout: replicas x stages x shards of one model over the ranks of one facility."""
