"""Benchmarks of Phalanx beside what a user could pick instead."""
