"""Small quantised matrices, and what the libraries of their formats make of them: a file
NAME.safetensors each, which `make` writes. Beside the stored tensors it holds `expected`, and in
its metadata the `quantization_config`.

    python3 -m venv V
    V/bin/pip install torch==2.13.0 transformers==5.24.0 compressed-tensors==0.20.0
    V/bin/python -m tests.weights.quantised.make
"""

from pathlib import Path

FOLDER = Path(__file__).parent
