"""Keeping the replicas of one facility together without waiting for the slowest."""
