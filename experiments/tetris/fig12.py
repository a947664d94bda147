"""Figure 12: figure 11 for Llama-3 70B."""

from __future__ import annotations

from experiments.figures import Figure
from experiments.papers import main
from experiments.tetris.fig11 import CLAIMS, PANELS, sweep
from experiments.tetris.systems import MODELS, SEVERAL

FIGURE = Figure(
    "fig12",
    "Fixed improvement rates over one that follows the load, Llama-3 70B",
    "simulated",
    lambda settings: sweep(settings, MODELS[1]),
    CLAIMS,
    PANELS,
    mechanisms=(SEVERAL,),
    seeded=True,
)

if __name__ == "__main__":
    main(FIGURE, "tetris")
