"""What happened, line by line (Part 9): a profile in the book's notation, on one process or on all ranks.

`record` opens one; `timeline` is what it saw, as data, on one `clock`, with torch.profiler's own `torch_trace`; `split`
says where each line's time went, `stragglers` who is waited for, `advice` what to change; `result` is all of it.
"""

from scaling.profile.record import profile
from scaling.profile.result import Profile, of
from scaling.profile.timeline import LineRun, RankTimeline

__all__ = ["LineRun", "Profile", "RankTimeline", "of", "profile"]
