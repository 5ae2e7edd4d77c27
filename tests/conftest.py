from hypothesis import settings

# A busy machine is slow, not wrong.
settings.register_profile("headwise", deadline=None)
settings.load_profile("headwise")

# Files of a toy mechanism, for `test_adding_a_mechanism.py` to lay over a copy of the package.
collect_ignore = ["adding_a_mechanism"]
