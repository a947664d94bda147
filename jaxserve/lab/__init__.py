"""Laboratory: simulations, sweeps, benchmarks and demonstrations. Serving imports nothing of it."""
