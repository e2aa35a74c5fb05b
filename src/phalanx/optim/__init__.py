"""Optimizers that know of other ranks."""
