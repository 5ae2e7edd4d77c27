"""What a conversion keeps on disk while it runs: hidden states between layers, and converted layers."""
