"""Samplers that give each rank its part of a dataset."""

from phalanx.data.grouping import LengthGroupedSampler
from phalanx.data.sampler import DistributedSampler, EpochSampler, WeightedDistributedSampler

__all__ = [
    "DistributedSampler",
    "EpochSampler",
    "LengthGroupedSampler",
    "WeightedDistributedSampler",
]
