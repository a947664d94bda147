"""The tables and figures of the context parallel paper (Meta), again: one file for each.

`paper` is what the paper prints, `system` its hosts as a model of time over
`jaxserve.lanes.exchange`, calibrated on three of its tables, and `figure` the command line.
`python -m experiments.context_parallel` makes all of them; `experiments/notebooks/exchange.ipynb`
has the hosts beside those of jaxserve's own profiles.
"""
