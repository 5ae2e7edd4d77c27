"""The cost of training a layer: the tensors that it keeps for the backward pass, and its FLOPs."""
