"""Offline inference: a model in this process, prompts in, completions out.

python -m experiments.examples.offline --model=smollm2-135m --mesh=tp=3
"""

from __future__ import annotations

import argparse

from jaxserve import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="fetched name, folder or .gguf")
    parser.add_argument("--mesh", default="", help="degrees of the mesh axes: spp=N,kvp=N,tp=N")
    arguments = parser.parse_args()

    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=24)
    with LLM(arguments.model, arguments.mesh) as llm:
        for prompt, completion in zip(PROMPTS, llm.generate(PROMPTS, sampling)):
            print(f"{prompt!r} -> {completion.text!r} ({completion.reason})")


if __name__ == "__main__":
    main()
