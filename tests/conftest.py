"""For all tests: a hypothesis example may take as long as a busy machine makes it take."""

from hypothesis import settings

settings.register_profile("dgemma", deadline=None)
settings.load_profile("dgemma")
