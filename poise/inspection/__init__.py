"""`poise.inspect`: what every attention head of a model does, as a table, as JSON, and as a page with its maps."""

from poise.inspection.result import Head, Inspection
from poise.inspection.run import inspect

__all__ = ["Head", "Inspection", "inspect"]
