"""Data-parallel training: DistributedDataParallel and SyncBatchNorm."""
