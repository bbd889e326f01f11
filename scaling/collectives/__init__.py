"""The typed collectives and products: `all_gather("W[D_X, F] -> W[D, F]", W, mesh)` (Part 3).

`calls` has the collectives, and `masked`, which makes partial sums; `multiply` has einsum, `plans` runs plans and
programs of `scaling.algebra`, and `rings` has the collectives hop by hop. Beneath them, `op` has a collective as data
and the table of kinds, `lines` prepares a line to run, `moves` moves the data of each kind, `linear` runs an op and
differentiates it, and `checked` lets the ranks compare their calls.
"""

from scaling.collectives.calls import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    masked,
    ppermute,
    ragged_all_to_all,
    reduce,
    reduce_scatter,
    scatter,
    shard,
    unshard,
)
from scaling.collectives.linear import Pending, wait
from scaling.collectives.messages import recv, send
from scaling.collectives.multiply import Deferred, einsum, join_products
from scaling.collectives.plans import reshard, run, run_backward, run_forward, run_program
from scaling.collectives.transfer import Message, plan_transfer, transfer

__all__ = ["Deferred", "Message", "Pending", "all_gather", "all_reduce", "all_to_all", "broadcast", "einsum", "gather"]
__all__ += [
    "join_products",
    "masked",
    "ppermute",
    "ragged_all_to_all",
    "recv",
    "reduce",
    "reduce_scatter",
    "reshard",
    "run",
    "run_backward",
    "run_forward",
]
__all__ += ["plan_transfer", "run_program", "scatter", "send", "shard", "transfer", "unshard", "wait"]
