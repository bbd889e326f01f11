"""The systems of "How to Scale Your Model", as pure functions in PyTorch."""
