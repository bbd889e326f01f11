"""Batch-invariant prefill and decode: a request's logits are the same bits for any batch, slot, page table or chunking.

A product's bits can change with its number of rows, since that chooses the kernel and so the order of its sums. Here
every product has a fixed shape. Rows (tokens of all requests together) are filled up and cut into tiles of a few sizes;
sizes are used beside each other only after `agreeing` has found, on this machine and for the model's own matrices,
that a row has the same bits in each. Attention is of tiles of few tokens against blocks of `BLOCK` keys that stand at
fixed places of the sequence, whose softmax statistics are combined in order; a block of which nothing is seen changes
nothing. A token is routed by itself, an expert's rows are tiles again, and a token's choices are added in their order.
What the ranks of Y give in part is gathered and added in the order of the ranks: an AllReduce cuts its message by its
size, and so adds in an order that the batch changes. int8 is exact: a number and its scale depend on their own token
and head alone. Chunks, prefix hits and preemptions then only say which call computes a row.
"""

from scaling.serve.invariant.step import check_axes, extend, prefill
from scaling.serve.invariant.tiles import agreeing

__all__ = ["agreeing", "check_axes", "extend", "prefill"]
