"""Pictures of shardings, schedules and curves, in the terminal or as files: `python -m scaling.show "A[I_X, J_Y]"`.

shardings           the blocks of a type, and the devices that hold them
frames, svg         a listing frame by frame, as text and as SVG
bars, timelines     time lines, and the schedules of pipelines
charts              curves
params              every leaf of a model with its type
"""

from scaling.show.shardings import NINE, blocks, draw, main, picture_of_blocks

__all__ = ["NINE", "blocks", "draw", "main", "picture_of_blocks"]
