"""A simulator of pipelines, of replicas that synchronise, and of whole federations. Pure: numpy, no torch."""
