"""One small file for each model family, named after transformers' ``model_type``; each defines ``FAMILY``."""
