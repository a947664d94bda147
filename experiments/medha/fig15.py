"""Figure 15: distributions of the time to the first token under load, without and with long
requests; and capacity."""

from __future__ import annotations

from collections.abc import Iterator

from experiments.bounds import greatest, load_of_share
from experiments.figures import Claim, Figure, Panel, Row, Rows, cell, ratio
from experiments.medha.figure import MedhaSettings
from experiments.medha.systems import LOADS, SHARED, LoadCase, rows_of
from experiments.papers import main

COMPARED = ("medha", "loongserve", "fcfs", "sarathi-512")  # whose capacities are, at all loads
SYSTEMS = {**dict.fromkeys(COMPARED, LOADS), "sarathi-2048": (0.75,)}
# without long requests
SHORT = {"medha": (0.25, 1.75), "loongserve": (0.25, 1.75), "sarathi-512": (1.75,)}
SERVED = 0.9  # share of each class in its objectives, at a load that counts as served


def cases() -> Iterator[tuple[str, LoadCase]]:
    for percent, systems in ((0, SHORT), (5, SYSTEMS)):
        for name, loads in systems.items():
            yield from ((name, LoadCase(qps, percent)) for qps in loads)


def sweep(settings: MedhaSettings) -> Iterator[Row]:
    for name, case in cases():
        yield from rows_of(name, case, settings)


def row(system: str, qps: float, long_percent: int = 5, percent: int = 50) -> Row:
    return dict(system=system, qps=qps, long_percent=long_percent, percent=percent)


def capacity(rows: Rows, name: str) -> float:
    """The load up to which both classes of requests are in their objectives."""
    met = lambda qps: min(
        cell(rows, column, **row(name, qps)) for column in ("met_short", "met_long")
    )
    return load_of_share([(qps, met(qps)) for qps in LOADS], SERVED)


def _capacity_ratio(rows: Rows) -> float:
    return capacity(rows, "medha") / greatest(capacity(rows, name) for name in COMPARED[1:])


def _short_ratio(rows: Rows) -> float:
    """Medha's share of short requests in their objectives over the best baseline's, at 1.25 q/s."""
    met = lambda name: cell(rows, "met_short", **row(name, 1.25))
    return met("medha") / max(met(name) for name in COMPARED[1:])


FIGURE = Figure(
    "fig15",
    "TTFT under load, Llama-3 8B, 16 A100",
    "simulated",
    sweep,
    mechanisms=(SHARED,),
    seeded=True,
    claims=(
        Claim(
            "median TTFT, LoongServe / Medha, 0.75 q/s, 5 % long",
            30,
            lambda rows: ratio(rows, "ttft_s", row("loongserve", 0.75), row("medha", 0.75)),
            "5.2",
            better="higher",
            remark="the abstract prints 30 %, the body 30X: the body is meant. Here LoongServe's "
            "queue at this load grows for longer than a run: over an hour, with the costs of then "
            "and no noise, it was 68x; at 1.25 q/s it is 2 to 340x by seed within a run",
        ),
        Claim(
            "median TTFT, Sarathi (512) / Medha, 0.75 q/s, 5 % long",
            1,
            lambda rows: ratio(rows, "ttft_s", row("sarathi-512", 0.75), row("medha", 0.75)),
            "5.2: 'quickly degrade'",
            better="higher",
            limit=True,
        ),
        Claim(
            "median TTFT, FCFS / Medha, 0.75 q/s, 5 % long",
            1,
            lambda rows: ratio(rows, "ttft_s", row("fcfs", 0.75), row("medha", 0.75)),
            "5.2: 'quickly degrade'",
            better="higher",
            limit=True,
        ),
        Claim(
            "capacity, 90 % of short and of long requests in their objectives, Medha / best "
            "baseline",
            5,
            _capacity_ratio,
            "5.2",
            better="higher",
            remark="the paper calls 1.25 q/s acceptable for Medha and 0.25 for the others by the "
            "median TTFT, and gives no limit. Here a load counts where 90 % of each class have "
            "their first token and their tokens in time (our default objectives), at the same four "
            "loads for all; > and <: not passed at the highest, or passed at the lowest",
        ),
        Claim(
            "capacity of Medha, 90 % of short and of long requests in their objectives",
            1.25,
            lambda rows: capacity(rows, "medha"),
            "5.2: 'acceptable' at 1.25 q/s",
            "q/s",
            better="higher",
        ),
        Claim(
            "share of short requests in their objectives, 1.25 q/s, 5 % long, Medha / best "
            "baseline",
            1,
            _short_ratio,
            "5.2",
            better="higher",
            limit=True,
        ),
        Claim(
            "median TTFT, LoongServe / Medha, 0.25 q/s, none long",
            1,
            lambda rows: ratio(rows, "ttft_s", row("loongserve", 0.25, 0), row("medha", 0.25, 0)),
            "5.2: 'comparable'",
            remark="a short prompt passes our two stages one after the other; LoongServe gives "
            "it all free instances and an ideal ring",
        ),
        Claim(
            "P90 TTFT of LoongServe, none long, 1.75 / 0.25 q/s",
            2,
            lambda rows: ratio(
                rows, "ttft_s", row("loongserve", 1.75, 0, 90), row("loongserve", 0.25, 0, 90)
            ),
            "5.2: 'increases dramatically', say 2x",
            better="higher",
            limit=True,
            remark="our LoongServe moves KV and scales at no cost, so short prompts alone never "
            "fill it",
        ),
        Claim(
            "median TTFT, Sarathi (512) / Medha, 1.75 q/s, none long",
            1,
            lambda rows: ratio(rows, "ttft_s", row("sarathi-512", 1.75, 0), row("medha", 1.75, 0)),
            "5.2: 'considerably better'",
            better="higher",
            limit=True,
            remark="our Sarathi has sequence pipelining, which the paper's has not: it is our "
            "scheduler with other settings",
        ),
    ),
    panels=(
        *(
            Panel(
                f"none long, {qps:g} q/s",
                "ttft_s",
                "percent",
                "system",
                (("long_percent", 0), ("qps", qps)),
                "x",
            )
            for qps in (0.25, 1.75)
        ),
        *(
            Panel(
                f"5 % long, {qps:g} q/s",
                "ttft_s",
                "percent",
                "system",
                (("long_percent", 5), ("qps", qps)),
                "x",
            )
            for qps in LOADS
        ),
    ),
)

if __name__ == "__main__":
    main(FIGURE, "medha")
