"""What was moved and computed, line by line, and the memory it took."""

from scaling.trace.events import Event, Log, done, now, open_logs, reached, record, trace

__all__ = ["Event", "Log", "done", "now", "open_logs", "reached", "record", "trace"]
