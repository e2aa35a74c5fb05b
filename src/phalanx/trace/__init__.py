"""Recording what every rank does, and showing it: ``phalanx trace``."""

from phalanx.trace.recorder import is_recording, range, record, start, stop

__all__ = ["is_recording", "range", "record", "start", "stop"]
