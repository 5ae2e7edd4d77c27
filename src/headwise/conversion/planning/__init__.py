"""What was asked for, and what each layer becomes."""
