"""The control plane of one pool of KV over lanes (TokenLake).

    interface          Pool: what is cached, what share of the lanes that takes, and where batches
                       run (Fig. 5); PoolScheduler: decides batches, and names no lane
    prefix_tree        PrefixTree: the prefixes that can be found, and how many read them
    elastic_scheduler  ElasticScheduler: a PoolScheduler by `elastic`

Pure functions of integers:

dispatch   matches requests to lanes such that the fewest bytes move
load       the share of all lanes that attention over cached prefixes takes
elastic    batches of a step and their degrees, by a dynamic program
"""
