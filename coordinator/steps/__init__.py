"""What the workflow engine runs at the coordinator, one module per CWL tool, and the pure decisions they take."""
