"""`python -m scaling.train`."""

import sys

from scaling.common.console import command_of

if __name__ == "__main__":  # a spawned rank imports this file under another name, and must not run it again
    sys.exit(command_of("scaling.train.command"))
