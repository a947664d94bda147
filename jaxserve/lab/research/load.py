"""Loads on replicas: when requests come, and how long their prompts and outputs are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxserve.lab.simulate import workload
from jaxserve.lab.simulate.arrival import Arrival, scaled
from jaxserve.settings.fields import Settings, option, own_options
from jaxserve.settings.schema import ConfigError

TRACE = "trace"
PROCESSES = ("poisson", "gamma", "constant")


@dataclasses.dataclass(frozen=True)
class Load(Settings):
    """Requests, and when they come: as a process says (`qps`), as a trace says (`workload` with
    times of its own), or each when another has ended (`concurrency`)."""

    workload: str = option("", "file or generator, as for simulate; default: prompt, output")
    prompt: str = option(
        "256", "tokens of a prompt: N, LOW:HIGH, exponential:MEAN or lognormal:MEDIAN:SIGMA"
    )
    output: str = option("16", "tokens of an output, likewise")
    prefix: int | None = option(None, "further tokens before each prompt, shared by its group", 1)
    groups: int = option(1, "how many such prefixes there are, drawn evenly", 1)
    arrivals: str | None = option(
        None,
        "when requests come: as a process of rate qps says, or the trace; default: as the "
        "workload says, else poisson",
        choices=(*PROCESSES, TRACE),
    )
    burstiness: float = option(
        1.0, "of gamma: shape of the gaps' distribution; 1 is poisson, less is burstier", 0.001
    )
    qps: float | None = option(None, "requests per second", 1e-6)
    concurrency: int | None = option(None, "requests at once, the next when one has ended", 1)
    requests: int = option(20, "how many", 1)
    seed: int = option(0, "of arrivals, lengths and prompts", 0)
    time_scale: float = option(1.0, "factor of a trace's times; below 1 is faster", 1e-6)
    length_scale: float = option(
        1.0, "factor of the workload's lengths; what prompts share is kept, block by block", 1e-6
    )

    def schedule(self) -> list[Arrival]:
        """The requests by time. Errors: ConfigError."""
        self.check()
        qps = self.qps
        if qps is None and not self.recorded:
            qps = 1.0
        arrivals = workload.parse(self._spec(), qps=qps, requests=self.requests, seed=self.seed)
        return self.timed([scaled(each, self.time_scale, self.length_scale) for each in arrivals])

    def timed(self, arrivals: Sequence[Arrival]) -> list[Arrival]:
        """Arrivals at the times of the process that is asked for, if one is."""
        process = self.arrivals or TRACE
        if self.arrivals is None and self.conversations:
            process = "poisson"
        if process == TRACE or self.qps is None:
            return list(arrivals)
        options = {"burstiness": str(self.burstiness)}
        return workload.retimed(list(arrivals), process, self.qps, self.seed, options)

    @property
    def recorded(self) -> bool:
        """True if the arrivals are a file's."""
        return bool(self.workload) and self.workload.partition(":")[0] not in workload.TIMES

    @property
    def conversations(self) -> bool:
        """True if the workload is a file of conversations, whose lengths a tokenizer counts."""
        return self.workload.endswith(".json")

    @property
    def own_times(self) -> bool:
        """True if requests come at the times of the workload's file."""
        return self.recorded and not self.conversations and self.arrivals in (None, TRACE)

    def check(self) -> None:
        """Refuses what goes not together. Errors: ConfigError."""
        both = self.qps is not None and self.concurrency is not None
        neither = self.qps is None and self.concurrency is None
        if both or (neither and not self.own_times):
            raise ConfigError("qps", "give either qps or concurrency")
        if self.concurrency is not None and self.arrivals is not None:
            raise ConfigError(
                "arrivals", "goes not with concurrency: each comes when one has ended"
            )
        if self.arrivals == TRACE and not self.own_times:
            raise ConfigError("arrivals", "trace needs a workload that is a file with times")
        if self.time_scale != 1 and (self.qps is not None or not self.own_times):
            raise ConfigError("time_scale", "goes with a trace's own times, and without qps")
        if self.burstiness != 1 and self.arrivals != "gamma":
            raise ConfigError("burstiness", "goes with arrivals=gamma")
        if self.length_scale != 1 and self.conversations:
            raise ConfigError("length_scale", "goes with lengths, not with conversations")
        if self.workload and self.prefix is not None:
            raise ConfigError("prefix", "goes with prompt and output, not with a workload")

    def _spec(self) -> str:
        if self.workload:
            return self.workload
        shared = ""
        if self.prefix:
            shared = f",prefix={self.prefix},groups={self.groups}"
        return f"poisson:prompt={self.prompt},output={self.output}{shared}"


LOAD = {option.name: option for option in own_options(Load)}
