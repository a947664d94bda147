"""The transformer that runs every supported model: `decoder` (stages, blocks and LM head),
`attention` and `mlp` (modules of a block, by the specs of `checkpoint.specs`), `parameters` (made
as declared), and `layers` (RMSNorm, RoPE and activations as pure functions)."""
