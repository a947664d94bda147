"""Plans which prefill instances, or lanes of a replica, compute which part of a long prompt.
Decisions only, over numbers; time is an argument.

    cdsp         cuts a prompt into chunks, each for a larger group than the one before (Tetris)
    improvement  how much a larger group must save, by load
    lanes        the lanes of a replica as the instances of `cdsp`
"""
