"""What happened, line by line (Part 9): a profile in the book's notation, on one process or on all ranks.

`record` opens one; `timeline` is what it saw, as data, on one `clock`; `split`, `memory` and `stragglers` read it;
`advice` says what to change; `table` shows it, and `torch_trace` has torch.profiler's own of all ranks.
"""

from scaling.profile.record import profile
from scaling.profile.result import Profile, of
from scaling.profile.timeline import LineRun, RankTimeline

__all__ = ["LineRun", "Profile", "RankTimeline", "of", "profile"]
