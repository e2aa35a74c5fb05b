"""Communication hooks: other ways to reduce the gradients of DistributedDataParallel."""
