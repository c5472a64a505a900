"""`crossfed quickstart`: a federation.yml from what the sites themselves answer, and its facilities set up."""
