"""``phalanx demo``: a tour in a minute.

``programs`` is what the tour runs and shows; ``command`` leads through it, on a ``stage`` that
suits a terminal as well as a pipe; ``gloo`` and ``training`` have the code that is not shown.
"""
