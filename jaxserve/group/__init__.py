"""One replica over several processes: who is a member, where its devices are in the mesh, the
channel between leader and workers, and the supervisor that starts and ends them. No JAX.

The leader runs the scheduler, the cache and the server, and has no device. A worker, one per host
or several, has the devices; it executes the leader's step commands. See `engine.worker_group` for
the leader's side of that and `engine.worker_process` for the worker's.
"""
