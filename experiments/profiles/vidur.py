"""Tables of Vidur (MLSys'24): layer parts, chunk attention and messages of A100 and H100. Times
become seconds, sizes bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

PRODUCTS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
ELEMENTWISE = ("input_layernorm", "attn_rope", "post_attention_layernorm", "mlp_act", "add")
PARTS = PRODUCTS + ELEMENTWISE


def _read(data: Path, name: str) -> pd.DataFrame:
    """Reads a table. Errors: FileNotFoundError that names the file."""
    path = data / "vidur" / f"{name}.csv.gz"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    return pd.read_csv(path).rename(columns=lambda column: column.removeprefix("time_stats."))


def linear(
    data: Path, name: str, tp: int, parts: tuple[str, ...] = PARTS
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and seconds of these parts of one layer on one of `tp` ranks. name: a file, for
    example 'a100__Meta-Llama-3-8B__mlp'."""
    table = _read(data, name)
    table = table[table.num_tensor_parallel_workers == tp].sort_values("num_tokens")
    return table.num_tokens.to_numpy(float), table[[f"{part}.median" for part in parts]].sum(
        axis=1
    ).to_numpy() * 1e-3


def chunks(data: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cached tokens, new tokens, seconds: Llama-2-70B's attention of one layer on one of two A100
    ranks (32 heads, 4 kv heads)."""
    table = _read(data, "a100__old_attention")
    table = table[table.is_prefill & (table.batch_size == 1)]
    return (
        table.kv_cache_size.to_numpy(float),
        table.prefill_chunk_size.to_numpy(float),
        table["attn_prefill.median"].to_numpy() * 1e-3,
    )


def sends(data: Path, device: str) -> tuple[np.ndarray, np.ndarray]:
    """Bytes, and seconds from a device to one in another node."""
    table = _read(data, f"{device}_dgx__send_recv")
    table = table[table.devices_per_node == 1].sort_values("size")
    return table["size"].to_numpy(float), table["send_recv.median"].to_numpy() * 1e-3


def sends_hdr(data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns `sends` from A100 to A100 through one 200 Gbit/s adapter each; begins at about 90 us,
    that of an eager launch."""
    table = _read(data, "a100__old_p2p_inter_node")
    return (
        (2 * table.n_embd * table.num_tokens / table.num_tensor_parallel_workers).to_numpy(float),
        table["send_recv.median"].to_numpy() * 1e-3,
    )


def all_reduces(data: Path, device: str, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes, and seconds of a sum over `ranks` devices of one node."""
    table = _read(data, f"{device}_dgx__all_reduce")
    table = table[(table.num_workers == ranks) & (table.devices_per_node == ranks)].sort_values(
        "size"
    )
    return table["size"].to_numpy(float), table["all_reduce.median"].to_numpy() * 1e-3


def timings(data: Path, name: str) -> pd.DataFrame:
    """Mean and standard deviation of the repeated times of a layer's parts, in milliseconds, a row
    for each number of tokens and ranks; deviations of the parts are added up. name: as of
    `linear`."""
    columns = _read(data, name)[[f"{part}.{of}" for part in PARTS for of in ("mean", "std")]]
    sums = {of: columns.filter(like=f".{of}").sum(axis=1) for of in ("mean", "std")}
    return pd.DataFrame(sums)
