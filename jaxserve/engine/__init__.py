"""The live replica. `build` makes an `Engine` from settings; requests enter by `Engine.submit` and
come back as events.

A step on its way: the scheduler's `Batch` (ints) -> `command_builder` (a compiled shape, one int32
row per lane, as a `StepCommand`) -> `worker`, which runs `stages` (the wavefront over the stages'
`step` programs, then `sampling` beside the last) -> a `StepResult`, read one step behind -> the
scheduler's `finish` -> events.
"""
