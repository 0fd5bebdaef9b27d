"""Slow reference implementations, written from the papers with index loops. They import no code under test."""
