"""Research notebooks: one question each, answered with pictures. What they compute is in
`jaxserve.lab.research`; they are kept without outputs.

`python -m experiments.notebooks` executes them and keeps their pictures; `execute` does one, with
the `sizes` that tests run.
"""
