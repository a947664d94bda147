"""Several replicas as one server: who computes a request, or a part of it. Decisions only, over
numbers; time is an argument.

`cdsp` cuts a long prompt into chunks, each for a larger group of prefill instances than the one
before (Tetris).
"""
