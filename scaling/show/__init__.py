"""Pictures of shardings, schedules and curves, in the terminal or as files: `python -m scaling.show "A[I_X, J_Y]"`."""

from scaling.show.shardings import NINE, blocks, draw, main, picture_of_blocks

__all__ = ["NINE", "blocks", "draw", "main", "picture_of_blocks"]
