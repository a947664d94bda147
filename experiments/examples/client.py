"""Two clients of one server: jaxserve's own over gRPC, and the openai package over HTTP.

    pip install -e '.[examples]' && python -m experiments.examples.client --model=smollm2-135m

The server is started here, on free ports; one that runs already needs its two addresses only.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator

from openai import OpenAI

from jaxserve import SamplingParams
from jaxserve.server.client import Client
from jaxserve.text.output import Delta

PROMPT = "The capital of France is"
READY_SECONDS = 600.0  # for the model to be loaded and compiled


@contextlib.contextmanager
def served(model: str) -> Iterator[tuple[str, str]]:
    """Starts `jaxserve serve`; gives its gRPC address and the URL of its HTTP port."""
    command = [sys.executable, "-m", "jaxserve", "serve", "--grpc_port=0", "--port=0"]
    with subprocess.Popen(
        [*command, f"--model={model}"], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip(), server.stdout.readline().strip()
        finally:
            server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="fetched name, folder or .gguf")
    model = parser.parse_args().model

    with served(model) as (target, url):
        with Client(target) as client:
            client.wait_ready(READY_SECONDS)
            print("gRPC:", end=" ")
            for output in client.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8)):
                if isinstance(output, Delta):
                    print(output.text, end="", flush=True)
            print()

        openai = OpenAI(base_url=f"{url}/v1", api_key="none")
        stream = openai.completions.create(
            model=model, prompt=PROMPT, temperature=0, max_tokens=8, stream=True
        )
        print("HTTP:", end=" ")
        for chunk in stream:
            print(chunk.choices[0].text if chunk.choices else "", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
