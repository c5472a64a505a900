"""The parts of `facility.gate`: the site's policy, what a request may say, and the few things that it may do."""
