"""Starting ranks, here or under torchrun, and watching them."""

from scaling.launch.process import keep_freed_memory
from scaling.launch.ranks import fit, run, start
from scaling.launch.watch import RankError
from scaling.sizes import parse_mesh

__all__ = ["RankError", "fit", "keep_freed_memory", "parse_mesh", "run", "start"]
