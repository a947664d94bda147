"""The control plane of one pool of KV over lanes (TokenLake): pure functions of integers.

dispatch   matches requests to lanes such that the fewest bytes move
load       the share of all lanes that attention over cached prefixes takes
elastic    batches of a step and their degrees, by a dynamic program
"""
