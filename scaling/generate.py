"""Run the command `python -m scaling.generate`, which is `scaling.serve.generate_command`."""

import sys

from scaling.common.console import command_of

if __name__ == "__main__":  # which a spawned rank does not run again
    sys.exit(command_of("scaling.serve.generate_command"))
