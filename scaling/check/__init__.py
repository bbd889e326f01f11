"""The static type checker for code in this notation: `python -m scaling.check FILE...`."""

from scaling.check.files import Finding, check_file, check_source, files_of, main

__all__ = ["Finding", "check_file", "check_source", "files_of", "main"]
