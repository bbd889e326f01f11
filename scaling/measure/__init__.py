"""Measure this machine: the command `measure`, and `measure network`."""
