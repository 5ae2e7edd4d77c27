"""Caches of transformers models: with spare memory, quantised, or in the codes of a converted model."""

from headwise.runtime.caches.cache import HeadwiseCache, default_cache
