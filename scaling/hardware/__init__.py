"""Chips, their links and what they are made of, as data and arithmetic (Parts 1, 2 and 12). No torch."""

from scaling.hardware.catalogue import Chip, Level, Measured, check_slice, chip, chips, load_chip, variants

__all__ = ["Chip", "Level", "Measured", "check_slice", "chip", "chips", "load_chip", "variants"]
