"""Profile a program line by line (Part 9) in the book's notation, on one process or on all ranks.

`record` opens a profile; `timeline` holds the recorded data, with torch.profiler's own `torch_trace`;
`split` divides each line's time into parts, `stragglers` names the ranks that others wait for, `advice` says what to
change; `result` puts all of it together.
"""

from scaling.profile.record import profile
from scaling.profile.result import Profile, of
from scaling.profile.timeline import LineRun, RankTimeline

__all__ = ["LineRun", "Profile", "RankTimeline", "of", "profile"]
