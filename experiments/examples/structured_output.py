"""Structured output: completions that obey a JSON schema, a list of choices or a regex.

python -m experiments.examples.structured_output --model=smollm2-135m
"""

from __future__ import annotations

import argparse
import json

from jaxserve import LLM, SamplingParams
from jaxserve.text.structured_output import Guided

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
QUESTIONS = [
    ("Describe a person as JSON: ", Guided("json_schema", json.dumps(PERSON))),
    ("The sky is ", Guided("choice", choices=("blue", "green"))),
    ("A date in the year 2000: ", Guided("regex", r"2000-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="fetched name, folder or .gguf")
    arguments = parser.parse_args()

    prompts = [prompt for prompt, _ in QUESTIONS]
    guided = [guide for _, guide in QUESTIONS]
    with LLM(arguments.model) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=256)
        for prompt, completion in zip(prompts, llm.generate(prompts, sampling, guided=guided)):
            print(f"{prompt}{completion.text}")


if __name__ == "__main__":
    main()
