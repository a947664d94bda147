"""Proposes tokens that steps check: several of a sequence in one step, of which those count that
the model would have sampled (speculative decoding; Leviathan et al., 2023)."""
