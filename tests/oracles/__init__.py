"""Slow, obvious twins written from the papers with loops over indices; nothing here imports the code it judges."""
