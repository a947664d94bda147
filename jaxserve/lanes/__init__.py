"""Everything about several lanes: where the blocks of a sequence lie, how lanes exchange queries
and KV, what that costs, and which lanes compute what. Integers only, no JAX.

    groups     aligned groups of lanes that meet
    layout     SequenceLayout: page, lane and index in its row of each block of a sequence
    placement  Placement: chooses the lane of the next block; PLACEMENTS
    moves      PageMoves, Rebalance: blocks that change lanes
"""
