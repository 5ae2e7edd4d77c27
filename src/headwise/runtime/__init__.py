"""What runs a model: attention and its kernels, codes of caches, caches, transformers models, several ranks."""
