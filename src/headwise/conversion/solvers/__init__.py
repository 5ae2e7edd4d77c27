"""The mathematics of conversion: pure functions of tensors."""
