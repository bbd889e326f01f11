"""The forms of sharded decoding, each a listing of one layer's attention and MLP and of the ends on a mesh.

    heads        heads and features over Y, a prompt over C; the cache's batch over Z, where the weights are replicas
    heads_batch  heads and features over Y and Z; the cache's heads over Y and its batch over Z, by two AllToAlls
    sequence     the same weights; the cache's sequence over Z, partial softmaxes combined
    experts      attention by data: the cache's batch over E, its heads over Y, and whole experts over both
    weights_2d   "2d": weights over X as well, and the residual stream over all axes (Part 7, Appendix B)

Each has embed(rows, here, at) -> x, attention(W, x, at, l) -> Attn, mlp(W, x, at) -> Out, and head(params, x, at) ->
logits[B, T, V]. Axes that the mesh lacks drop out of a line, and on one device all forms are the same.
"""
