"""Layout of a model replica over devices, and the collectives between them.

A replica is a mesh of stages x lanes x ranks, with axes ("spp", "kvp", "tp"). Pipeline *stages*
hold different layers, *lanes* different blocks of the KV cache (KV parallelism, also called context
parallelism), *ranks* different heads (tensor parallelism). Each stage runs on a sub-mesh of lanes
and ranks.

`mesh` makes the meshes, `rules` maps logical axes of arrays to mesh axes, `rows` says which tokens
a lane computes and where their KV goes, `attention` runs a layer's attention, `exchange` is how it
reaches KV on other lanes, and `page_moves` moves pages between lanes.
"""
