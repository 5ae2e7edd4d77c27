"""How one total of cached values is spread over layers."""
