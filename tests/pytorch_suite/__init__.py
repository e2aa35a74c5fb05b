"""PyTorch's own tests of torch.distributed, run on Phalanx and compared with what is expected.

``python -m pytorch_suite`` runs the runs of :mod:`pytorch_suite.runs`, ``python -m
pytorch_suite.run`` any other; both with ``tests`` on the path.
"""
