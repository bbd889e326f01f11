"""`python -m scaling.posttrain`."""

import sys

from scaling.common.console import command_of

if __name__ == "__main__":
    sys.exit(command_of("scaling.posttrain.command"))
