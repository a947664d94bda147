"""Model configurations (`zoo`, plain numbers, no JAX) and the one decoder that runs all of them
(`decoder`, `layers`)."""
