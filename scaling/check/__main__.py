"""Run the judge: `python -m scaling.check FILE...`."""

import sys

from scaling.check.files import main
from scaling.common.console import command

sys.exit(command(main))
