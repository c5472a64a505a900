"""`crossfed publish`: a model that can be released, with what is needed to judge it and to make it again."""
