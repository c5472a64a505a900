"""A federation by groups: every facility has a chain of rounds of its own and averages with those who are there."""
