import sys

from scaling.console import command
from scaling.show.shardings import main

sys.exit(command(main))
