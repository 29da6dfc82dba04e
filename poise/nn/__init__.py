"""Building blocks around the operator: projections, positions, multi-head attention, feed-forward, stacks."""

from poise.nn.attention import (
    CAUSAL,
    EVERYTHING,
    EXACT,
    Call,
    Choice,
    Exact,
    KeyValues,
    LearnedScale,
    LogLength,
    MultiHeadAttention,
    Visible,
)
from poise.nn.feedforward import FeedForward
from poise.nn.linear import ACTIVATIONS, Linear, linear
from poise.nn.norm import RMSNorm
from poise.nn.packing import Packing
from poise.nn.positions import (
    Alibi,
    Learned,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Placement,
    RelativeBuckets,
    Rotary,
    Scheme,
    Sinusoidal,
    YaRNScaling,
)
from poise.nn.projection import Projection
from poise.nn.stack import Block, BlockConfig, Decoder, Encoder, EncoderDecoder, Stack
from poise.nn.twin import TorchMultiheadAttention, from_torch

__all__ = [
    "ACTIVATIONS",
    "CAUSAL",
    "EVERYTHING",
    "EXACT",
    "Alibi",
    "Block",
    "BlockConfig",
    "Call",
    "Choice",
    "Decoder",
    "Encoder",
    "EncoderDecoder",
    "Exact",
    "FeedForward",
    "KeyValues",
    "Learned",
    "LearnedScale",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "LogLength",
    "MultiHeadAttention",
    "NTKScaling",
    "Packing",
    "Placement",
    "Projection",
    "RMSNorm",
    "RelativeBuckets",
    "Rotary",
    "Scheme",
    "Sinusoidal",
    "Stack",
    "TorchMultiheadAttention",
    "Visible",
    "YaRNScaling",
    "from_torch",
    "linear",
]
