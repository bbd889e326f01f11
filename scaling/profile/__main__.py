"""Run `python -m scaling.profile`."""

import sys

from scaling.common.console import command_of

if __name__ == "__main__":  # false in a spawned rank
    sys.exit(command_of("scaling.profile.command"))
