"""The notation: types such as `W[D_X, F] {U_Y}` and the lines between types.

`reader` reads them from text, and `types` holds them as data. `sizes` has the sizes of meshes and dtypes, and the
formats of arrays with scales.
"""

from scaling.spec.reader import ShardingError, refuse
from scaling.spec.sizes import DTYPE_BYTES, FORMATS, Format, dtype_bytes, format_of, mesh_sizes
from scaling.spec.types import (
    Line,
    Spec,
    block_index,
    format_axes,
    parse,
    parse_line,
    present,
)

__all__ = ["DTYPE_BYTES", "FORMATS", "Format", "Line", "ShardingError", "Spec", "block_index", "dtype_bytes"]
__all__ += ["format_axes", "format_of", "mesh_sizes", "parse", "parse_line", "present", "refuse"]
