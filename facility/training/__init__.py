"""What runs inside one facility in one round: the parts that `facility.train` puts together."""
