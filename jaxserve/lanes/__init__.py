"""Everything about several lanes: where the blocks of a sequence lie, how lanes exchange queries
and KV, what that costs, and which lanes compute what. Integers only, no JAX.

    groups     aligned groups of lanes that meet
    work       heads and sums over a step's spread chunks
    rates      how fast lanes attend and send
    exchange   EXCHANGES: the strategies, their bytes and seconds
    choice     ExchangeChooser: the exchange of a step; CHOOSERS
    load       LaneLoad: the work of one lane in a step
    cost       LaneCosts: what several lanes add to the time of a step
    layout     SequenceLayout: page, lane and index in its row of each block of a sequence
    placement  Placement: chooses the lane of the next block; PLACEMENTS
    segments   least tokens that a placement should put on a lane as one
    dealing    PromptLanes: the lanes of prompts by their tokens, for predictions
    cdsp       PLANNERS: which lanes compute which part of a prompt; `improvement` by load
    instance_queues      PlannedQueues: prefill instances that do what `cdsp` planned
    improvement_search   finds improvement rates by simulation
    planner    LanePlanner: the lanes of a replica as the instances of `cdsp`
    moves      PageMoves, Rebalance: blocks that change lanes
"""
