"""Tables of aiconfigurator-core 0.12.0: products, attention, sums over ranks and served requests.
Times become seconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from jaxserve.lanes.work import ITEM

ENGINES = {  # device -> engine -> version of its tables
    "a100": {"sglang": "0.5.10", "vllm": "0.14.0"},
    "h100": {"sglang": "0.5.14", "vllm": "0.24.0"},
    "h200": {"sglang": "0.5.14", "vllm": "0.24.0"},
}
NCCL = {"a100": "2.27.3", "h100": "2.29.2", "h200": "2.29.2"}


def file(device: str, engine: str, table: str) -> str:
    """Name of a table, as in the folder of the device."""
    group = "comm"
    if table == "gemm":
        group = "gemm"
    elif "attention" in table:
        group = "attention"
    version = ENGINES[device][engine]
    return f"{group}__{engine}__{version}__{table}_perf"


def _read(data: Path, device: str, name: str) -> pd.DataFrame:
    """Reads a table. Errors: FileNotFoundError that names the file."""
    path = data / "aiconfigurator" / f"{device}_sxm" / f"{name}.parquet"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    return pd.read_parquet(path)


def attention(
    data: Path, device: str, engine: str, kind: str, heads: int, kv_heads: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequences, tokens of each (kind 'context': all new, 'generation': in the cache), seconds;
    heads of 128, bf16."""
    table = _read(data, device, file(device, engine, f"{kind}_attention"))
    keep = (
        (table.head_dim == 128)
        & (table.attn_dtype == "bfloat16")
        & (table.kv_cache_dtype == "bfloat16")
    )
    keep &= (table.num_heads == heads) & (table.num_key_value_heads == kv_heads)
    if "window_size" in table:
        keep &= table.window_size == 0
    table = table[keep]
    tokens = table.isl + table.step if kind == "generation" else table.isl
    return table.batch_size.to_numpy(float), tokens.to_numpy(float), table.latency.to_numpy() * 1e-3


class Products:
    """Seconds of [m, k] x [k, n] in bf16: what the table has, and between its n and k seconds per n
    k, linear in log n and log k."""

    def __init__(self, data: Path, device: str, engine: str):
        table = _read(data, device, file(device, engine, "gemm"))
        table = table[table.gemm_dtype == "bfloat16"]
        grid = table.groupby(["m", "n", "k"]).latency.median().unstack("k").sort_index() * 1e-3
        self.m = grid.index.get_level_values("m").unique().to_numpy(float)
        self.n = grid.index.get_level_values("n").unique().to_numpy(float)
        self.k = grid.columns.to_numpy(float)
        self.seconds = grid.to_numpy().reshape(len(self.m), len(self.n), len(self.k))

    def __call__(self, n: float, k: float) -> np.ndarray:
        """Seconds for each of `self.m`. Beyond the table, as the largest product there per n k."""
        n_index = np.log(self.n)
        k_index = np.log(self.k)
        rates = self.seconds / np.outer(self.n, self.k)
        out = []
        for rate in rates:
            known = ~np.isnan(rate)
            some = known.any(1)
            of_n = [
                np.interp(np.log(k), k_index[here], row[here])
                for row, here in zip(rate[some], known[some])
            ]
            out.append(np.interp(np.log(n), n_index[some], of_n))
        return np.array(out) * n * k


def all_reduces(data: Path, device: str, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes, and seconds of a sum over `ranks` devices: of NCCL and SGLang's own kernel in a CUDA
    graph, the faster. The tables' message_size counts elements, of two bytes each."""
    nccl = _read(data, device, f"comm__nccl__{NCCL[device]}__nccl_perf")
    nccl = nccl[(nccl.nccl_dtype == "half") & (nccl.op_name == "all_reduce")]
    own = _read(data, device, file(device, "sglang", "custom_allreduce"))
    own = own[own.backend.str.contains("graph")]
    best = (
        pd.concat([table[table.num_gpus == ranks] for table in (nccl, own)])
        .groupby("message_size")
        .latency.min()
    )
    return best.index.to_numpy(float) * ITEM, best.to_numpy() * 1e-3


def served(data: Path) -> pd.DataFrame:
    """Measured bf16 points: model_path, system, backend, isl, osl, batch_size, tp_size,
    silicon_ttft_ms, silicon_tpot_ms."""
    path = data / "aiconfigurator" / "e2e" / "silicon_sample_h100_h200_llama_qwen32b.csv.gz"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing")
    table = pd.read_csv(path)
    return table[table.precision.isna() & (table["mode"] == "agg")]
