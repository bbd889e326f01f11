"""Shared tools without a subject: checks of arguments, the terminal, tables, lazy names, private torch."""
