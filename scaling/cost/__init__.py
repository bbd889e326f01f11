"""The cost model: seconds and bytes of operations, collectives, layers and steps, in SI units (Parts 1, 2, 3, 5, 12).

`roofline` covers one chip, `collectives` a torus, `gpu` a node and a tree of switches, `layers` the strategies, and
`memory` the bytes per chip; `transformer` counts params, FLOPs and caches. These are the book's formulas, as are
`serving` and `decoding` for a decode step. `counted` prices a step of this library's own code, which
`lines` holds as polynomials of its sizes, and `lanes` prices collectives on any network. Collectives have the same
names on both networks: `cost.all_gather` is for a torus, `cost.gpu.all_gather` for a tree of switches.
"""

# ruff: noqa: F401
from scaling.cost import gpu
from scaling.cost.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    latency_bound_bytes,
    permute,
    point_to_point,
    reduce_scatter,
    seconds,
)
from scaling.cost.layers import (
    STRATEGIES,
    Cost,
    LayerShape,
    Links,
    data_threshold,
    expert_inflation,
    layer,
    layer_bytes,
    layer_flops,
    mixed_optimum,
    mixed_threshold,
    pipeline_comms,
    pod_threshold,
    tensor_limit,
)
from scaling.cost.memory import Memory, checkpoint_bytes, largest_model, training_memory
from scaling.cost.roofline import (
    Roofline,
    attainable,
    critical_batch,
    matmul,
    mfu,
    roofline,
    seconds_at,
    split_contraction,
    tiled_matmul,
)
