"""The transformer that runs every supported model: `decoder` (modules) and `layers` (RMSNorm, RoPE,
SwiGLU as pure functions). Which model it is, `checkpoint.zoo.ModelConfig` says."""
