"""``phalanx doctor``: what would make a job slow or fail on this host.

``command`` runs the checks and shows what they find; ``findings`` is what they share; the others
have the checks, by subject.
"""
