"""The target that a user asks for, and the plan of its conversion."""
