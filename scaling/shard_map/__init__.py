"""Manual sharding (Part 10): programs for one device, with JAX's collectives, as functions of whole arrays.

`manual` has shard_map, `names` the collectives as JAX spells them, `calls` their law of transposes and what runs them,
on ranks or in one process, `types` what varies over which axis, or is unreduced or reduced, and the checks.
"""

from scaling.shard_map.manual import shard_map
from scaling.shard_map.names import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    dynamic_slice_in_dim,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    psum,
    psum_scatter,
    pvary,
    vma,
)

__all__ = ["all_gather", "all_to_all", "axis_index", "axis_size", "dynamic_slice_in_dim", "pcast", "pmax", "pmean"]
__all__ += ["pmin", "ppermute", "psum", "psum_scatter", "pvary", "shard_map", "vma"]
