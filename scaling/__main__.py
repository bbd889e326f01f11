"""The command `scaling`: one word for each tool, `scaling show "A[I_X, J_Y]"`. `python -m scaling` is the same."""

import sys

from scaling import __version__
from scaling.common.console import command_of

TOOLS = {  # word -> (module, a line of help)
    "train": ("scaling.train.command", "train a Transformer on your text, on any mesh"),
    "generate": ("scaling.serve.generate_command", "text from a model or a training run"),
    "serve": ("scaling.serve.command", "a file of requests, by continuous batching"),
    "show": ("scaling.show", "which device holds which block; pipeline schedules"),
    "check": ("scaling.check", "the types of every line of Python files, run on an abstract mesh"),
    "plan": ("scaling.plan.__main__", "the mesh to train a model on, and why; `plan guide` for a few GPUs"),
    "profile": ("scaling.profile.command", "where the time of a chapter goes, line by line"),
    "measure": ("scaling.measure.command", "this machine's rates, as a chip file for the cost model"),
}
USAGE = "usage: scaling [--version] [--help] TOOL ...\n\n" + "\n".join(
    f"  {tool:9} {what}" for tool, (_, what) in TOOLS.items()
)
USAGE += "\n\n`scaling TOOL --help` explains each tool."


def main(arguments: list[str] | None = None) -> int:
    """Run one of the tools on the rest of the arguments; returns its exit code."""
    tool, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if tool in TOOLS:
        return command_of(TOOLS[tool][0], rest)
    if tool in ("--version", "--help", "-h"):
        print(f"scaling {__version__}" if tool == "--version" else USAGE)
        return 0
    print(f"scaling: there is no tool {tool!r}\n{USAGE}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
