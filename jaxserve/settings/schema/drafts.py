"""Settings of the draft model, which proposes tokens that the replica's own model checks."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.settings.fields import Settings, option
from jaxserve.settings.schema.model import QUANTIZATIONS


@dataclass(frozen=True)
class DraftConfig(Settings):
    """A draft model or head, and what it may take of a device. A model runs on the replica's first
    device, a head on one of the last stage."""

    draft_model: str | None = option(
        None,
        "what proposes tokens: a smaller model with the same tokenizer (drafts=model), or an "
        "EAGLE-3 head of the model (drafts=eagle3); a name or folder as of model",
    )
    draft_revision: str | None = option(
        None, "branch, tag or commit of a draft model given by a hub id; default: main"
    )
    draft_quantization: str = option(
        "auto",
        "its weights on the device, as of quantization; int8 makes a draft model of a model itself",
        choices=QUANTIZATIONS,
    )
    draft_context: int = option(
        4096,
        "last tokens of a sequence that the draft model or head sees at most: it has room for them",
        low=128,
    )
    draft_seqs: int = option(
        16,
        "sequences that the draft model or head has room for; where there are more, those that "
        "began first have proposals",
        low=1,
        high=256,
    )
