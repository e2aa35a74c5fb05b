"""Programs that use torch.distributed, on ranks that are threads of a test's process.

Torch keeps what it knows of groups in one place per process. While such a world runs, `patches`
puts in that place what asks `ranks` for the state of the calling thread's rank. `environment` is
what a launcher would have told each rank, `meeting` how ranks that make a group learn of one that
will not come, `compiling` torch.compile for each rank. `world` has what a test calls,
`phalanx.testing.torch_world`.
"""
