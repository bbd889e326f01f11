"""Record the transfers and computations of a run, line by line, and the memory that they take."""

from scaling.trace.events import Event, Log, call_returned, done, now, open_logs, reached, record, trace, waited

__all__ = ["Event", "Log", "call_returned", "done", "now", "open_logs", "reached", "record", "trace", "waited"]
