"""Chips, their parts and their links as data and arithmetic (Parts 1, 2 and 12); only `systolic` needs torch."""

from scaling.hardware.catalogue import CHIPS, chip, chips, load_chip
from scaling.hardware.chip import Chip, Efficiency, Level, Measured, check_slice

__all__ = ["CHIPS", "Chip", "Efficiency", "Level", "Measured", "check_slice", "chip", "chips", "load_chip"]
