"""What a facility does around the training of a round: find finished work again, sweep old models, report failures."""
