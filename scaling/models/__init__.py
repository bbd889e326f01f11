"""Models as pure functions: the transformer, its params, files and tokenizers."""
