"""Tables of LLMServingSim: prefill and decode attention in one batch (RTX PRO 6000, Llama-3.1-8B),
and chunks after a prefix (H100)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

MIXED = "llmservingsim/RTXPRO6000__Llama-3.1-8B__tp1__attention_mixed.csv.gz"
CHUNKS = "llmservingsim/H100__Llama-3.1-70B__tp4__attention.csv.gz"


def batches(data: Path) -> np.ndarray:
    """[points, 3]: seconds of the chunk alone, of the decodes alone and of both in one kernel.
    Errors: FileNotFoundError."""
    table = _read(data / MIXED)
    chunk = (
        table[(table.n_decode == 0)]
        .set_index(["prefill_chunk", "kv_prefill"])
        .time_us.rename("chunk")
    )
    decode = (
        table[(table.prefill_chunk == 0)]
        .set_index(["n_decode", "kv_decode"])
        .time_us.rename("decode")
    )
    both = table[(table.prefill_chunk > 0) & (table.n_decode > 0)]
    both = (
        both.join(chunk, on=["prefill_chunk", "kv_prefill"])
        .join(decode, on=["n_decode", "kv_decode"])
        .dropna()
    )
    return both[["chunk", "decode", "time_us"]].to_numpy() * 1e-6


def fit_mixed(measured: np.ndarray) -> tuple[float, float, float]:
    """The coefficient `mixed` with the least mean relative error, that error, and the error without
    it."""
    alone = measured[:, 0] + measured[:, 1]
    least = measured[:, :2].min(1)
    seconds = measured[:, 2]
    tried = np.arange(-1, 1.01, 0.01)
    errors = [float(np.abs((alone + value * least) / seconds - 1).mean()) for value in tried]
    best = int(np.argmin(errors))
    return round(float(tried[best]), 2), errors[best], float(np.abs(alone / seconds - 1).mean())


def chunks(data: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cached tokens, new tokens, seconds: Llama-3.1-70B's attention of one layer on one of four
    H100 ranks (16 heads, 2 kv heads)."""
    table = _read(data / CHUNKS)
    table = table[table.is_prefill & (table.batch_size == 1)]
    return (
        table.kv_cache_size.to_numpy(float),
        table.prefill_chunk_size.to_numpy(float),
        table["time_stats.attn_prefill.median"].to_numpy() * 1e-3,
    )


def _read(path: Path) -> pd.DataFrame:
    """Reads a table. Errors: FileNotFoundError that names the file."""
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    return pd.read_csv(path)
