"""Secure aggregation at the coordinator: the roster of a round, the request that is pending, taking the masks off."""
