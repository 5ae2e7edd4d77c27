"""The formats and bytes of stored weights: by ``quantization_config`` in a config, or by a GGUF file's tensors."""
