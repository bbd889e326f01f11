"""What the oracles share: each compares with another library, and with --write stores what the suite compares with."""

from pathlib import Path

from scaling.common.console import Parser


def asked_to_store(doc: str | None, table: Path) -> bool:
    """Whether the command of an oracle, by its docstring, is to store its table."""
    parser = Parser(description=doc)
    parser.add_argument("--write", action="store_true", help=f"store {table.name}, which the suite compares with")
    return parser.parse_args().write
