"""Initial models in the form that a federation sends, and what it ends with as others load it (`coordinator.model`)."""
