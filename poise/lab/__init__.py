"""The lab: each claim about score scaling as an experiment, its verdict computed from what it measures."""
