"""The figures of Medha's evaluation, again: one file per figure.

A figure is a sweep that yields rows, the paper's numbers beside the ones read off those rows, and
panels to draw. `figure` is what they share: command line, CSV, table, picture. `systems` simulates
servers under load, `closed` asks the predictor alone. `python -m experiments.medha` makes all
figures, and `summary` a table of them.
"""
