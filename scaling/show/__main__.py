"""Run the command `python -m scaling.show`."""

import sys

from scaling.common.console import command
from scaling.show.shardings import main

sys.exit(command(main))
