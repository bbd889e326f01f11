"""What was moved and computed, line by line, and the memory it took."""

from scaling.trace.events import Event, Log, active, done, now, reached, record, trace

__all__ = ["Event", "Log", "active", "done", "now", "reached", "record", "trace"]
