"""Predicts when first tokens come, and says when they are due."""

from __future__ import annotations

import numpy as np

from jaxserve.api.attainment import Promise
from jaxserve.api.request import Request
from jaxserve.costs.predictor import Predictor
from jaxserve.policies import POLICIES
from jaxserve.scheduling.budget import SHARER_WORK_RATIO
from jaxserve.scheduling.sequence import Sequence
from jaxserve.scheduling.slots import SlotTable
from jaxserve.settings.schema import SchedulerConfig
from jaxserve.settings.schema.objectives import Objectives


class PrefillTimes:
    """Predicted times of prompts on one replica, and the objectives that they are to meet."""

    def __init__(self, config: SchedulerConfig, predictor: Predictor):
        self.config = config
        self.predictor = predictor

    # --- what is due

    def objectives(self, request: Request) -> Objectives:
        """Returns the objectives of the request's class."""
        return self.config.objectives[request.slo.class_name]

    def deadline(self, request: Request) -> float:
        """Returns the clock second at which the request's first token is due."""
        return self.objectives(request).deadline(request, self.seconds(0, len(request.prompt)))

    def promise(self, request: Request) -> Promise:
        """Returns the latencies that the request is promised."""
        ttft = self.deadline(request) - request.arrival
        objectives = self.objectives(request)
        return Promise(ttft, objectives.tpot_of(request), objectives.tbt_of(request))

    def feasible(self, request: Request) -> bool:
        """Returns whether the TTFT objective could be met if the request were alone."""
        alone = self.seconds(0, len(request.prompt))
        return self.objectives(request).ttft_of(request, alone) >= alone

    # --- what is predicted

    def seconds(self, cached: int, total: int) -> float:
        """Predicts seconds to prefill tokens `cached` to before `total` in the largest chunks."""
        return self.predictor.prefill(cached, total, self.config.chunk_tokens)

    def alone(self, prompt: int) -> float:
        """Predicts seconds to the first token of a prompt of `prompt` tokens that has the replica
        to itself."""
        return self.seconds(0, prompt) + self._passage(prompt)

    def waiting(self, sequence: Sequence, slots: SlotTable, begun: float) -> float:
        """Predicts seconds from arrival to the first token of the youngest waiting sequence.

        That is `begun` seconds for the step in progress, the work that the policy ranks before it
        now, shared by the lanes, and its own. Decodes that share its steps do not count.
        """
        config = self.config
        prompts = slots.prompts(sequence.request.arrival)
        key = POLICIES[config.policy].order(prompts)
        work = float(prompts.work[-1])  # the youngest: those of equal rank go before it
        ahead = prompts.work[:-1][key[:-1] <= key[-1]]
        if config.chunking == "adaptive" and config.sharing > 0:
            # what a longer prompt takes of the steps that both are in
            shared = work * (1 - config.sharing) / config.sharing
            ahead = np.where(SHARER_WORK_RATIO * ahead >= work, np.minimum(ahead, shared), ahead)
        seconds = begun + float(ahead.sum()) / self.predictor.mesh.kvp
        return seconds + work + self._passage(sequence.prefill_len)

    def running(self, sequence: Sequence, done: int, now: float) -> float:
        """Predicts seconds from arrival to the first token of a sequence with `done` tokens of its
        prompt computed at clock second `now`: the others are taken to be as slow."""
        began = sequence.started_at or 0.0
        work = self.seconds(sequence.cached_tokens, done)
        slower = max(1.0, (now - began) / work) if work > 0 else 1.0
        seconds_left = slower * self.seconds(done, sequence.prefill_len)
        return now - sequence.request.arrival + seconds_left

    def _passage(self, prompt: int) -> float:
        """Predicts seconds that a prompt's last chunk takes through the stages after the first."""
        chunk = min(prompt, self.config.chunk_tokens)
        pace = self.seconds(prompt - chunk, prompt)
        if self.config.chunking == "adaptive":
            pace = min(pace, self.config.step_time / self.predictor.mesh.spp)
        return self.predictor.latency(pace, chunk, 1) - pace
