"""Engines that others wrote, between machines or on other devices: Gloo, NCCL, MPI.

`messages.MessageEngine` makes a backend of anything that carries bytes between two ranks, a
`wire.Wire`: Gloo by `gloo`, MPI by `mpi`. `direct.DirectEngine` hands whole operations to a
process group of torch's, for devices whose memory Phalanx does not read: NCCL and its relatives.
"""
