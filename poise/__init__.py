"""Exact attention that shows its scores: the public names, nothing else."""

from poise import hf
from poise.explanation import Explanation, explain
from poise.inspection import Inspection, inspect
from poise.kvview import KVView
from poise.mask import (
    Mask,
    blocks,
    causal,
    dilated,
    documents,
    global_tokens,
    keep,
    lengths,
    prefix,
    window,
)
from poise.monitor.remedies import remedy
from poise.monitor.watch import Watch, watch
from poise.op import attention, observe, received, scores
from poise.score import Bias, alibi, alibi_slopes, relative
from poise.sdpa import scaled_dot_product_attention
from poise.stats import ScoreStats, merge
from poise.summary import ScoreSummary

__version__ = "0.1.0"

__all__ = [
    "Bias",
    "Explanation",
    "Inspection",
    "KVView",
    "Mask",
    "ScoreStats",
    "ScoreSummary",
    "Watch",
    "alibi",
    "alibi_slopes",
    "attention",
    "blocks",
    "causal",
    "dilated",
    "documents",
    "explain",
    "global_tokens",
    "hf",
    "inspect",
    "keep",
    "lengths",
    "merge",
    "observe",
    "prefix",
    "received",
    "relative",
    "remedy",
    "scaled_dot_product_attention",
    "scores",
    "watch",
    "window",
]
