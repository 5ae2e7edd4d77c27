"""What a conversion writes: folder formats and the model card."""
