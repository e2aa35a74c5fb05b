"""What operations would cost on more hosts than there are here: a model, fitted to measurements."""
