"""Compiles for NVIDIA GPUs that are not there: what describes them, the compiler, and what its
programs say."""
