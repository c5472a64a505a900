"""What both sides compute of differential privacy: the loss of planned and of past releases."""
