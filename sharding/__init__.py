"""How one replica lies over devices: the mesh and its axes, the table from logical to mesh axes,
and where lanes meet.

A replica is stages x lanes x ranks, `Mesh(devices, ("spp", "kvp", "tp"))`; each stage runs on its
own sub-mesh of lanes and ranks.
"""
