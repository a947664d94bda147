"""Figure 1: requests within both objectives, conversation workload."""

from experiments.mooncake.capacity import figure
from experiments.papers import main

FIGURE = figure("fig1", "conversation", (4.98, 1.57, 0.59), "Fig. 1")

if __name__ == "__main__":
    main(FIGURE, "mooncake")
