"""Examples are small; how long one takes says more about the machine's other work than about the code."""

from hypothesis import settings

settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
