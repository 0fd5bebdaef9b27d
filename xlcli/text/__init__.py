"""Text in, token ids out."""
