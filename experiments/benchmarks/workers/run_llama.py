"""llama.cpp, by its own programs: llama-bench for prefill, llama-batched-bench for decode, a
process for each measurement."""

import json
import re
import subprocess

import protocol


def bench_rate(text: str) -> float:
    """Tokens per second in the output of `llama-bench -o json`."""
    return json.loads(text)[0]["avg_ts"]


def batched_rate(text: str, sequences: int) -> float:
    """Generated tokens per second in the table of llama-batched-bench, whose columns are PP, TG, B,
    N_KV, T_PP, S_PP, T_TG, S_TG, T, S."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 10 and re.fullmatch(r"\d+", cells[2]) and int(cells[2]) == sequences:
            return float(cells[7])
    raise ValueError("llama-batched-bench printed no such row")


def main() -> None:
    settings = protocol.settings()

    def run(program: str, *arguments: object) -> str:
        command = [
            program,
            "-m",
            settings["model"],
            "-t",
            str(settings["threads"]),
            *map(str, arguments),
        ]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout

    def rate(kind: str, size: int) -> float:
        if kind == "prefill":
            return bench_rate(run("llama-bench", "-p", size, "-n", 0, "-r", 3, "-o", "json"))
        context = settings["context"]
        steps = settings["steps"]
        room = size * (context + steps) + 64
        return batched_rate(
            run("llama-batched-bench", "-c", room, "-npp", context, "-ntg", steps, "-npl", size),
            size,
        )

    protocol.answer({"llama.cpp": "as found"}, rate, lambda prompt, tokens: None)


if __name__ == "__main__":
    main()
