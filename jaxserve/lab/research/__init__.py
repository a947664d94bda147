"""Loads on replicas: sweeps over replicas of many settings, live on the devices here, simulated, or
both; and a load generator for servers.

load.py            what a replica is asked to do: times, lengths, what prompts share
prompts.py         the tokens of prompts
points.py          what a sweep is made of: settings, load, grids of both
drive.py           a load on one replica, live or virtual
measure.py         one point live, in a process of its own, and predicted with its costs
runner.py          all points of a sweep, one line of JSON each; what is finished is not run again
frames.py          the lines as pandas frames: sweep, pareto, timeline
predicted.py       what the predictor and the planners say before anything runs, as pandas frames
plots.py           frames drawn on axes: fronts, timelines, regions
report.py          the lines as one HTML page with pictures
transports.py      connections to a server, over HTTP or gRPC
generator.py       a load on a server, in an open or a closed loop
served_figures.py  figures of what a server answered
"""
