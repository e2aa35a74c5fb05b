"""Groups that span hosts: shared memory inside each, an existing engine between them.

``topology`` says who is where, ``wire`` moves tensors between two hosts with the announcement of
the operation they belong to, ``exchange`` has the algorithms among hosts, ``group`` composes them
with the local engine into a `GroupBackend`.
"""
