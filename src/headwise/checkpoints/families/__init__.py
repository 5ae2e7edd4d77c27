"""One small file a model family, named as transformers' ``model_type``; each defines ``FAMILY``."""
