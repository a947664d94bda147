"""Attention over pages, and the merge of its pieces. JAX only; knows nothing of models, meshes or
requests.

Every op has its meaning in `reference` (one screen, plain jnp) and its implementations beside it
with the same signature; `ops` alone chooses one by platform, dtype and shape. Pieces return `(out,
lse)`; `merge` puts pieces together, in any order.

Shapes, here and everywhere: R rows (each: consecutive tokens of one sequence), T query tokens of a
row, K kv heads, G query heads per kv head (N = K * G), H head dim, P pages, C tokens per page, W
table slots per sequence.
"""
