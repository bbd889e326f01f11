"""The command `generate`: text from a model."""
