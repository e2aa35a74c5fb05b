"""Groups that span hosts: shared memory inside each, an existing engine between them.

``hosts`` and ``topology`` say who is where, ``crossing`` moves tensors between two hosts with the
announcement of the operation they belong to, ``exchange`` has the algorithms among hosts,
``letters`` the messages, and ``group`` composes them with the local engine into a `GroupBackend`.
Beside the data, the ``warden`` of each rank knows which ranks and hosts live and what has failed;
a ``vigil`` is a wait that heeds it.
"""
