"""What weights take where they are stored: by ``quantization_config`` in a config, or by the tensors of a GGUF file."""
