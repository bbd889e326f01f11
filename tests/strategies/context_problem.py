"""Sizes and forms that the tests of context parallelism share."""

T, H, B = 48, 8, 2


FORMS = ("ring", "zigzag", "gather", "ulysses")
