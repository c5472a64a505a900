"""The machinery under the policies: scheduler service and client, process groups, peers, buckets, journal."""
