"""A fingerprint of a checkpoint's files: equal for equal weights, wherever they lie."""

from __future__ import annotations

import hashlib
from pathlib import Path

SAMPLES = 64  # pieces of a file that are read, evenly spread, the first and the last among them
PIECE = 1 << 16  # bytes
WEIGHTS = (".safetensors", ".gguf", ".bin")


def fingerprint(path: Path) -> str:
    """Hash of the sizes and of samples of a model's files: of a .gguf file, or of the weights and
    config.json in a folder. Weights that were trained further differ in every sample; a change of a
    few bytes between samples is not seen. Errors: OSError."""
    code = hashlib.sha256()
    for file in _files(path):
        size = file.stat().st_size
        code.update(f"{file.suffix} {size} ".encode())
        last = max(0, size - PIECE)
        with open(file, "rb") as opened:
            for offset in sorted({last * sample // (SAMPLES - 1) for sample in range(SAMPLES)}):
                opened.seek(offset)
                code.update(opened.read(PIECE))
    return code.hexdigest()


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = [file for file in path.rglob("*") if file.is_file()]
    if not files:
        raise FileNotFoundError(f"{path}: no such file")
    listed = [file for file in files if file.suffix in WEIGHTS or file.name == "config.json"]
    weights = [file for file in listed if file.suffix in WEIGHTS]
    return sorted(listed if weights else files)  # a saved (orbax) folder: all of it
