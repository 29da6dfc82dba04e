"""Efficient forms of attention, each an attention choice of poise.nn: `choice(q, k, v, call)`.

Longformer and BigBird are exact over fewer pairs; Linformer and Performer approximate over all of them.
"""

from poise.variants.bigbird import BigBird
from poise.variants.linformer import Linformer
from poise.variants.longformer import Longformer, LongformerVisible
from poise.variants.performer import Performer, PerformerState

__all__ = ["BigBird", "Linformer", "Longformer", "LongformerVisible", "Performer", "PerformerState"]
