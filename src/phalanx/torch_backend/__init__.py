"""Phalanx as a backend of torch.distributed: ``init_process_group("phalanx")``.

After an installation torch knows it without an import. Where it does not look for backends
(``TORCH_DEVICE_BACKEND_AUTOLOAD=0``, or a source tree on the path), importing this does the same.

``group`` has the operations that torch calls, ``membership`` what else it asks a group; ``work``
is what it gets for operations in flight, with ``futures`` and ``limits`` to their time. ``store``
is how a store of torch serves Phalanx, ``worlds`` which of torch's groups share a Phalanx world,
``engines`` who serves other devices, ``lifted`` what torch keeps for its own backends unless told
better, ``replacing`` how groups of Gloo become Phalanx's, ``handlers`` what torch's debug server
can ask, and ``untraced`` how torch.compile leaves it all alone.
"""

from phalanx_autoload import register

register()
