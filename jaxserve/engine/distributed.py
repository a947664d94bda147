"""The processes of a replica as JAX sees them (`jax.distributed`): NCCL between GPUs, gloo and
sockets between CPUs. The only room that knows their addresses and private names."""

from __future__ import annotations

import os

import jax

from jaxserve.group.channel import free_port

HEARTBEAT_SECONDS = 30  # the supervisor notices earlier; this is for when it is gone too
CLIENT_THREADS = "32"


def join(
    coordinator: str,
    process: int,
    processes: int,
    devices: int,
    first: int,
    host: str,
    shared_stage: bool = False,
) -> None:
    """Joins the processes of a replica; before anything else of JAX.

    coordinator: HOST:PORT where process 0 lets the others meet. devices: how many this process
    has, on a GPU machine from number `first` on. host: this machine's address for the others.
    shared_stage: whether a stage has devices in several processes.
    Errors: RuntimeError where the others do not come.
    """
    # XLA's CPU client has a thread per core, and collectives that wait block some of them
    os.environ.setdefault("PJRT_NPROC", CLIENT_THREADS)
    # else JAX takes SIGTERM for itself and the process does not end
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_num_cpu_devices", devices)
    # the way of CPUs for `jax.device_put` between processes; it hangs with port 0
    address = f"{host}:{free_port(host)}"
    jax.config.update("jax_cross_host_transfer_socket_address", address)
    jax.config.update("jax_cross_host_transport_addresses", f"{host}:0,{host}:0")
    if on_gpu():
        _set_autotuning(shared_stage)
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        local_device_ids=list(range(first, first + devices)) if on_gpu() else None,
        heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=5,
    )
    count = len(jax.local_devices())
    if count < devices:
        raise RuntimeError(f"process {process} has {count} devices; the mesh needs {devices} of it")
    _keep_own_programs()


def on_gpu() -> bool:
    """Returns whether this machine's devices are GPUs, without asking JAX for them."""
    wanted = jax.config.jax_platforms or ""  # type: ignore[attr-defined]
    return "cpu" not in wanted.split(",")[:1] and os.path.exists("/proc/driver/nvidia")


def _set_autotuning(shared_stage: bool) -> None:
    """Processes that share a stage must run the same program: none is tuned, for each would tune
    its own, and with the work shared out one would wait for another that found its program on
    disk."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    wanted = ["--xla_gpu_shard_autotuning=false"]
    wanted += ["--xla_gpu_autotune_level=0"] if shared_stage else []
    given = {flag.partition("=")[0] for flag in flags}
    flags += [flag for flag in wanted if flag.partition("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join(flags)


def _keep_own_programs() -> None:
    """Has this process keep what it compiles on disk. JAX lets only process 0 do so, for it takes
    all programs for equal; here each process has the programs of its own stages."""
    from jax._src import distributed

    distributed.global_state.process_id = 0
