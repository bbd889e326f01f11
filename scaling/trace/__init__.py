"""What was moved and computed, line by line, and the memory it took."""

from scaling.trace.events import Event, Log, call_returned, done, now, open_logs, reached, record, trace, waited

__all__ = ["Event", "Log", "call_returned", "done", "now", "open_logs", "reached", "record", "trace", "waited"]
