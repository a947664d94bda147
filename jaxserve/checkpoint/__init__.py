"""A model before a weight is read, without JAX: its files and its configuration.

`fetch` turns a model's name into local files, which `model_paths` finds in the cache folder;
`gguf_file` reads the header of a GGUF file, `model_files` the small files of a folder;
`tokenizer_files` knows special tokens, added tokens and chat templates, `generation_config` the
recommended sampling; `model` has `ModelConfig` and the specs of a block's parts, which declare its
parameters; `rope` has rotary positions; `families` has a row for each supported architecture, by
which `model_config` turns a config.json or GGUF metadata into a `ModelConfig`; `zoo` lists
well-known models.
"""
