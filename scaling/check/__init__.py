"""The static type checker for code in this notation: `python -m scaling.check FILE...`."""

from scaling.check.files import Finding, Report, check_file, check_source, files_of, main, read_file, read_source
from scaling.check.rules import RULES

__all__ = ["RULES", "Finding", "Report", "check_file", "check_source", "files_of", "main", "read_file", "read_source"]
