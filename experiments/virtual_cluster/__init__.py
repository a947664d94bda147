"""A cluster of virtual replicas under one clock (`cluster`), with a `network` between its nodes and
the decisions of `jaxserve.cluster`; `report` sums up what came of its requests."""
