"""What is known of a model before a weight is read, without JAX: its files and its configuration.

`fetch` turns a model's name into local files, which `model_paths` finds in the cache folder;
`gguf_file` reads the header of a GGUF file; `model_config` turns a config.json or GGUF metadata
into a `ModelConfig`; `zoo` defines that and lists the shapes of well-known models.
"""
