from hypothesis import settings

# A busy machine is slow, not wrong.
settings.register_profile("headwise", deadline=None)
settings.load_profile("headwise")
