"""Simulation without devices: the scheduler and the cache that serve, on a virtual clock, with
steps that take as long as the predictor says.

`workload` reads or generates arrivals, `replica` is the virtual replica, `run` puts a system
together, drives arrivals through it and sums up what came of them, `recorder` keeps records of
requests and steps, `plan` searches for the best mesh. Results depend on arguments and seeds alone.

Baselines: `baselines` (the same scheduler with other settings, and which others there are),
`loongserve`, and `tetris` for prefill instances that `lanes.cdsp` plans for.
"""
