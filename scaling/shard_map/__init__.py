"""Manual sharding (Part 10): programs for one device, with JAX's collectives, as functions of whole arrays.

`manual` has shard_map, and `names` the collectives as JAX spells them. `calls` has their law of transposes and runs
them, on ranks or in one process. `types` tracks the axes over which a value varies, or is unreduced or reduced, and has
the checks.
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
