"""What helps when a program hangs or fails: the flight recorder, levels, breakpoints."""

from phalanx.debug.recorder import dump_flight_record, flight_record

__all__ = ["dump_flight_record", "flight_record"]
