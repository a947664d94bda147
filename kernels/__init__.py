"""Attention over a paged KV cache, and the merge of partial attention. JAX only: nothing here knows
of models, meshes or requests.

`reference` defines what attention means (plain jnp, slow). `xla` is a portable implementation,
`mosaic` one for NVIDIA Hopper, `triton` one for NVIDIA GPUs since Ampere and `cpu` one for CPUs,
with the same signature; `ops.attend` chooses by platform, dtype and shape. Attention over a part of
the keys returns `(out, lse)`, and `merge` combines parts in any order. `work_split` splits
attention over the thread blocks of a GPU. `kv_pages` is the storage format, with optional 8-bit
quantisation; `page_copy` copies whole pages between pools.

Shapes, here and everywhere: R rows (each: consecutive tokens of one sequence), T query tokens per
row, K kv heads, G query heads per kv head (N = K * G), H head dim, P pages, C tokens per page, W
page-table entries per sequence.
"""
