"""Lines that the tests of calls and of their arguments share."""

GATHER, SCATTER, REDUCE = "A[I_X, J] -> A[I, J]", "A[I, J] {U_X} -> A[I_X, J]", "A[I, J] {U_X} -> A[I, J]"
PRODUCT = "A[I, J] * B[J, K] -> C[I, K]"
