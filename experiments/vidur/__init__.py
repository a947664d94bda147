"""`jaxserve simulate` beside vidur, a simulator that others wrote: the same requests, settings and
costs of steps in both.

`comparison` says what is compared, runs both and works out the figures; `driver` runs inside
vidur's environment; `python -m experiments.vidur` makes that environment and prints the table.
"""
