"""Watching models: what their attention's scores are like, step by step, written down, and alarms."""
