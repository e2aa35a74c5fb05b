"""Algorithms on top of the collectives: communication hooks, model averaging, uneven inputs."""
