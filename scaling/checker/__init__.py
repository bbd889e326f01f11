"""The parts of the static type checker, `scaling.check`: values, calls and arithmetic, statements."""
