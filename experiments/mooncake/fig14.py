"""Figure 14: requests within both objectives, synthetic workload."""

from experiments.mooncake.capacity import figure
from experiments.papers import main

FIGURE = figure("fig14", "synthetic", (0.62, 0.40, 0.28), "Fig. 14")

if __name__ == "__main__":
    main(FIGURE, "mooncake")
