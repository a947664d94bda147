"""Everything about several lanes: where the blocks of a sequence lie, how lanes exchange queries
and KV, what that costs, and which lanes compute what. Integers only, no JAX.

    groups  aligned groups of lanes that meet
"""
