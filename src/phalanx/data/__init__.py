"""Samplers that give each rank its part of a dataset."""
