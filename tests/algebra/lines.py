"""One-line types of algorithms, and what is read of a derived program."""

DP = "In[B_X, D] * W_in[D, F] * W_out[F, D] -> Out[B_X, D]"
FSDP_TP = "In[B_X, D_Y] * W_in[D_X, F_Y] * W_out[F_Y, D_X] -> Out[B_X, D_Y]"


UNREDUCED = [  # the result, or an argument, is a partial sum: its cotangent is replicated
    "In[B, D_X] * W[D_X, F] -> Out[B, F] {U_X}",
    "In[B, D] * W[D, F_Y] -> Out[B, F_Y] {U_X}",
    "In[B_X, D_Y] * W_in[D_Y, F] * W_out[F_Y, D] -> Out[B_X, D] {U_Y}",
    "In[B, D] {U_X} * W[D, F_Y] -> Out[B, F_Y] {U_X}",
    "In[B, D_Y] {U_X} * W[D_Y, F] -> Out[B_X, F]",
]
LINES = [  # (line, mesh): what nobody wrote by hand
    (DP, {"X": 2}),
    (FSDP_TP, {"X": 2, "Y": 2}),
    ("In[B, D_XYZ] * W_in[D_X, F_YZ] * W_out[F_YZ, D_X] -> Out[B, D_XYZ]", {"X": 2, "Y": 2, "Z": 2}),
    ("In[B_XZ, D_Y] * W_in[D_XZ, F_Y] * W_out[F_Y, D_XZ] -> Out[B_XZ, D_Y]", {"X": 2, "Y": 2, "Z": 2}),
    ("In[B_X, D_YZ] * W_in[D_X, F_YZ] * W_out[F_YZ, D_X] -> Out[B_X, D_YZ]", {"X": 2, "Y": 2, "Z": 2}),
    ("In[B_X, D] * W_in[D_XZ, F_Y] * W_out[F_Y, D_XZ] -> Out[B_X, D]", {"X": 2, "Y": 2, "Z": 2}),
    ("In[B, D] * W_in[D, F_Y] * W_out[F_Y, D] -> Out[B, D]", {"Y": 4}),
    ("In[B, D_X] * W_in[D_X, F] * W_out[F_X, D] -> Out[B, D]", {"X": 4}),
    ("In[B_X, D] * W_1[D, F_Y] * W_2[F_Y, G] * W_3[G_Y, D] -> Out[B_X, D]", {"X": 2, "Y": 2}),
    ("In[B_X, T, D] * W_Q[D, N_Y, H] -> Q[B_X, T, N_Y, H]", {"X": 2, "Y": 2}),
    ("Q[B_X, T, N_Y, H] * K[B_X, S, N_Y, H] -> Att[B_X, N_Y, T, S]", {"X": 2, "Y": 2}),
    ("Att[B_X, N_Y, T, S] * V[B_X, S, N_Y, H] -> O[B_X, T, N_Y, H]", {"X": 2, "Y": 2}),
    ("O[B_X, T, N_Y, H] * W_O[N_Y, H, D] -> Out[B_X, T, D_Y]", {"X": 2, "Y": 2}),
    ("Q[B, T_X, N, H] * K[B, S_X, N, H] -> Att[B, N, T_X, S]", {"X": 4}),
    ("Q[B_X, T, H] *_H K[B_X, S, H] *_S V[B_X, S, H] -> O[B_X, T, H]", {"X": 2}),
    *((line, {"X": 2, "Y": 2}) for line in UNREDUCED),
]
SIZES = {"B": 8, "D": 16, "F": 8, "G": 4, "T": 4, "S": 8, "N": 4, "H": 2}
