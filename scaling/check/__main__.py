import sys

from scaling.check.files import main
from scaling.console import command

sys.exit(command(main))
