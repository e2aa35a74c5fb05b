"""Averaging the models of ranks that train on their own for a while."""
