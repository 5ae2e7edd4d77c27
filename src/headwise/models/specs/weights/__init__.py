"""What weights take as they are stored: by ``quantization_config`` in a config, or by a GGUF file's tensors."""
