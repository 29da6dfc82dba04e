"""Caches of keys and values for generation; base.py has what they promise."""

from poise.nn.cache.base import Cache, CacheFull
from poise.nn.cache.evict import heavy_hitters, sinks_and_recent
from poise.nn.cache.paged import PagedCache
from poise.nn.cache.slab import GrowingCache, QuantCache, RollingCache, StaticCache

__all__ = [
    "Cache",
    "CacheFull",
    "GrowingCache",
    "PagedCache",
    "QuantCache",
    "RollingCache",
    "StaticCache",
    "heavy_hitters",
    "sinks_and_recent",
]
