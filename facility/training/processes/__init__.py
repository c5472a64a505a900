"""The processes of one facility: how they meet, exchange small values, fail together and end."""
