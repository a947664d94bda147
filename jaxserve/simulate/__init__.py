"""A replica without devices: the real scheduler and cache under a virtual clock, steps that take as
long as the predictor says.

`workload` makes arrivals, `replica` executes them, `run` puts a system together and sums up what
came of it. Everything is a function of its arguments and a seed.

What jaxserve is compared with has rooms of its own: `loongserve`, and `tetris` for prefill
instances that `cluster.cdsp` plans for.
"""
