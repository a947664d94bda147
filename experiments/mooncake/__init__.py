"""The figures of Mooncake's evaluation: each file makes one, as rows, with the paper's numbers
beside it.

`figure` says what a sweep is given and where its traces come from, `cache_replay` drives a trace
through the engine's cache of pages alone, `cluster` through simulated clusters of replicas.
"""
