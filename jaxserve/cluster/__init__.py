"""The conductor of a cluster: which replica prefills and which decodes a request, from what each
has cached, how long its queue is, and what a transfer takes (Mooncake, sections 4 and 5).

    directory    Directory: which blocks of KV are on which replica, a shadow of what these have
    routing      Algorithm 1 and its baselines, as functions of frozen views of replicas
    admission    who is refused at overload: on arrival, or when decoding would begin
    assignments  Assignments: the work that was routed to a replica and has not ended
    other_work   OtherWork: what other conductors have on a replica, as it tells
    roles        roles of replicas, and the controller of how many have which

The live conductor is a `Replica` made of replicas:

    conductor    Conductor: threads, checks, members that come and go, questions to all of them
    member       Member: one replica, what was routed to it and how fast it is (decode_rate);
                 member_table: those that there are, objectives: what they promise
    router       Router: who serves a request and who computes its prompt; prefixes: who has what
    dispatcher   Dispatcher: the requests that have not ended (routed), and where they go when a
                 member fails; delivery: calls the callers' sinks; prefill_jobs: prompts that one
                 member computes for another
    arrivals     ArrivalCheck: refuses on arrival who would miss objectives
    role_changes RoleChanges: members that change sides where one side is more loaded;
                 role_board: on what conductors agree
    merge        what all members are and say together; counts: what a conductor counts itself

Decisions get time as an argument, so that simulated clusters make the same ones.
"""
