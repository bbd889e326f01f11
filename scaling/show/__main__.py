"""Run `python -m scaling.show`: draw shardings, or run the command that comes first."""

import sys

from scaling.common.console import command_of

COMMANDS = {  # each module is imported when its command runs: all but listings are drawn without torch
    "schedule": "scaling.show.timelines",
    "params": "scaling.show.params",
    "listing": "scaling.book.drawing",
}

if __name__ == "__main__":
    module = COMMANDS.get(" ".join(sys.argv[1:2]))
    sys.exit(command_of(module, sys.argv[2:]) if module else command_of("scaling.show.shardings", sys.argv[1:]))
