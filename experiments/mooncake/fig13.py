"""Figure 13: requests within both objectives, toolagent workload."""

from experiments.mooncake.capacity import figure
from experiments.papers import main

FIGURE = figure("fig13", "toolagent", (0.64, 0.42, 0.22), "Fig. 13")

if __name__ == "__main__":
    main(FIGURE, "mooncake")
