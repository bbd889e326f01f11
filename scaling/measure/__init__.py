"""What this machine does, measured: the command `measure`, and `measure network`."""
