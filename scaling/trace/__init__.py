"""Record the transfers and computations of a run, line by line, and the memory that they take.

`events` has `trace`, whose log lists what ran, and `peak` has `peak_memory`, which counts live bytes. `count` counts a
step for the cost model, and `symbols` reads its numbers as products of its sizes.
"""

from scaling.trace.events import Event, Log, call_returned, done, now, open_logs, reached, record, trace, waited

__all__ = ["Event", "Log", "call_returned", "done", "now", "open_logs", "reached", "record", "trace", "waited"]
