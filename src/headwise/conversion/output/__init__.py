"""The output of a conversion: the folder's layout, its formats, and the model card."""
