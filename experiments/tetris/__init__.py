"""The figures of Tetris' evaluation, again: one file per figure or table.

A figure is a sweep that yields rows, the paper's numbers beside the ones read off those rows, and
panels to draw. `figure` is what they share: command line, workloads. `model` says how long prefill
takes, `systems` simulates clusters under load. `python -m experiments.tetris` makes all figures,
and `summary` a table of them.
"""
