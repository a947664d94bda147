"""The transformer that runs every supported model: `decoder` (modules, built from the specs of
`checkpoint.model.ModelConfig`) and `layers` (RMSNorm, RoPE and activations as pure functions)."""
