"""Generate text from a model on the command line."""
