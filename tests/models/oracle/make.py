"""Asks transformers about the cases: see the package."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from jaxserve.checkpoint.model_config import from_hf
from jaxserve.checkpoint.specs import ExpertsSpec
from tests.models.oracle import BEST, Answer
from tests.models.oracle.cases import CASES, Case

NEW = 24  # tokens
# to rank experts: softmax keeps the order of logits
SCORES = {"softmax": lambda x: x, "sigmoid": torch.sigmoid, "chosen": lambda x: x}


def answer(case: Case) -> Answer:
    """Asks for greedy tokens and the best log-probabilities of every position, with eager attention
    in f32 and without a cache: transformers chooses the divisors of longrope by the longest
    position of a call."""
    with tempfile.TemporaryDirectory() as folder:
        model = load(case, Path(folder))
        saved = json.loads((Path(folder) / "config.json").read_text())
    prompt = np.random.default_rng(0).integers(3, case.config["vocab_size"], case.length).tolist()
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].double()
            ids.append(int(logits[-1].argmax()))
        with Gaps(model, case) as gaps:
            logits = model(torch.tensor([ids]), use_cache=False).logits[0].double()
    logprobs = torch.log_softmax(logits, -1)[:-1]
    best, tokens = logprobs.topk(BEST)
    new = ids[case.length :]
    margin = float((best[case.length - 1 :, 0] - best[case.length - 1 :, 1]).min())
    print(f"{len(set(new))} distinct tokens of {NEW}, smallest margin {margin:.3f}: {new}")
    print(f"smallest gap of routers {gaps.smallest:.1e}")
    saved["architectures"] = case.config["architectures"]
    return Answer(
        saved,
        prompt,
        new,
        tokens.numpy().astype(np.uint16),
        best.numpy().astype(np.float32),
        gaps.smallest,
    )


class Gaps:
    """Watches the routers of a model. smallest: see `Answer.gap`."""

    def __init__(self, model: torch.nn.Module, case: Case):
        self.smallest = np.inf
        self._model = from_hf(case.config)
        self._handles = []
        self._called = set()
        self._routers = {
            layer: module
            for name, module in model.named_modules()
            if name.endswith((".gate", ".router", ".router.proj"))
            and getattr(module, "weight", None) is not None
            for layer in [int(name.split(".")[2])]
            if len(module.weight) == self._model.experts
        }

    def __enter__(self) -> Gaps:
        for layer, module in self._routers.items():
            watch = functools.partial(self._watch, layer)
            self._handles.append(module.register_forward_pre_hook(watch))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        of_experts = {
            layer
            for layer in range(self._model.layers)
            if isinstance(self._model.mlp(layer), ExpertsSpec)
        }
        assert self._called == of_experts, "a router was not watched"

    def _watch(self, layer: int, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self._called.add(layer)
        weight = module.weight.detach().double()
        logits = inputs[0].detach().double().reshape(-1, weight.shape[1]) @ weight.T
        if getattr(module, "bias", None) is not None:
            logits += module.bias.detach()
        ranking = SCORES[self._model.mlp(layer).router.scores](logits)
        if getattr(module, "e_score_correction_bias", None) is not None:
            ranking += module.e_score_correction_bias.detach()
        self._measure(self._model.mlp(layer), ranking)

    def _measure(self, spec: ExpertsSpec, ranking: torch.Tensor) -> None:
        """Measures among groups, and among the experts of the best ones."""
        by_group = ranking.reshape(len(ranking), spec.router.groups, -1)
        if spec.router.groups > 1:
            values = by_group.topk(spec.router.group_scores)[0].sum(-1)
            self._between(values, spec.router.best_groups)
            best = values.topk(spec.router.best_groups)[1]
            others = torch.ones_like(values).scatter(1, best, 0).bool()
            by_group = by_group.masked_fill(others[..., None], -torch.inf)
        self._between(by_group.reshape(ranking.shape), spec.active)

    def _between(self, values: torch.Tensor, count: int) -> None:
        ranked = values.sort(-1, descending=True)[0]
        gap = (ranked[:, count - 1] - ranked[:, count]).min()
        self.smallest = min(self.smallest, float(gap))


def load(case: Case, folder: Path) -> torch.nn.Module:
    """Loads the case's weights as a folder of the tensors that a hub would hold."""
    decoder = getattr(transformers, case.config["architectures"][0])
    given = {k: v for k, v in case.config.items() if k not in ("architectures", "model_type")}
    decoder(decoder.config_class(**given)).save_pretrained(folder)
    file = folder / "model.safetensors"
    shapes = {name: tuple(value.shape) for name, value in load_file(file).items()}
    tensors = {k: torch.from_numpy(v) for k, v in case.weights(shapes).items()}
    save_file(tensors, file, {"format": "pt"})
    model, loading = decoder.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    return model.eval()


def main() -> None:
    for name in sys.argv[1:] or CASES:
        print(name, end=": ", flush=True)
        answer(CASES[name]).save(name)


if __name__ == "__main__":
    main()
