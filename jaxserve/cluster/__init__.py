"""The conductor of a cluster: which replica prefills and which decodes a request, from what each
has cached, how long its queue is, and what a transfer takes (Mooncake, sections 4 and 5).

    directory    Directory: which blocks of KV are on which replica, a shadow of what these have
    routing      Algorithm 1 and its baselines, as functions of frozen views of replicas
    admission    who is refused at overload: on arrival, or when decoding would begin
    assignments  Assignments: the work that was routed to a replica and has not ended
    allocation   BlockLedger: blocks that a node allocates and locks for conductors
    conductor    Conductor: a Replica made of replicas (`member`, `router`, `routed`, `merge`)
    roles        roles of replicas, and the controller of how many have which

Decisions get time as an argument; the simulated cluster (`simulate.cluster`) makes the same ones.
"""
