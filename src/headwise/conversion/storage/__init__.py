"""Files of a running conversion: hidden states between layers, and converted layers."""
