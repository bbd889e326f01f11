"""The notation: types such as `W[D_X, F] {U_Y}` and the lines between types.

`reader` reads them from text, `types` holds them as data, and `sizes` has the sizes of meshes and dtypes.
"""

from scaling.spec.reader import ShardingError, refuse
from scaling.spec.sizes import DTYPE_BYTES, dtype_bytes
from scaling.spec.types import (
    Line,
    Spec,
    block_index,
    format_axes,
    mesh_sizes,
    parse,
    parse_line,
    present,
)

__all__ = ["DTYPE_BYTES", "Line", "ShardingError", "Spec", "block_index", "dtype_bytes", "format_axes", "mesh_sizes"]
__all__ += ["parse", "parse_line", "present", "refuse"]
